"""Functions inside x and y, such as the activation of an Equinox module.

A point is a pytree of arrays, and a function is no array. So a function becomes a node without
leaves, which can be called like the function itself: everything that maps over arrays passes it by,
and a loss that calls `model(inputs)` notices nothing.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from aipod._misc.tree import is_numeric


class Kept(eqx.Module):
    """A function that stays as it is."""

    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def keep(tree: PyTree) -> PyTree:
    """The tree with its functions as nodes without leaves."""
    return jax.tree.map(lambda leaf: Kept(leaf) if _is_function(leaf) else leaf, tree)


def release(tree: PyTree) -> Any:
    """The tree with the functions that it had."""
    return jax.tree.map(
        lambda node: node.function if isinstance(node, Kept) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Kept),
    )


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and not is_numeric(leaf)
