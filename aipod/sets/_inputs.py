"""Checks of what sets are made from, and descriptions of it for messages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod._misc.tree import all_finite, is_concrete, same_structure


def describe_shapes(tree: PyTree) -> str:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)


def total_size(tree: PyTree) -> int:
    return sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree))


def largest(tree: PyTree) -> float:
    """The largest absolute value in a tree; 0 where it is empty."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.size(leaf)]
    return max((float(np.max(np.abs(np.asarray(leaf)))) for leaf in leaves), default=0.0)


def fits(tree: PyTree, like: PyTree) -> bool:
    """Whether a tree has the structure and the shapes of another."""
    return same_structure(tree, like) and all(
        jnp.shape(a) == jnp.shape(b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    )


def require_finite(value: Any, name: str) -> None:
    if not all_finite(value):
        raise ValueError(f"{name} holds NaN or infinity: clean it before making the set.")


def as_reals(value: Any, name: str) -> Any:
    """The leaves of value as finite real arrays of NumPy, or `ValueError`."""
    leaves, structure = jax.tree.flatten(value)
    arrays = [np.asarray(leaf) for leaf in leaves]
    if not arrays or any(array.dtype.kind not in "fiub" for array in arrays):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a number or an array of real numbers, got {kind}.")
    require_finite(arrays, name)
    return jax.tree.unflatten(structure, arrays)


def require_concrete(value: Any, owner: str) -> None:
    # Inside jit a new array is a tracer, also where all arguments are constants.
    if not is_concrete((value, jnp.zeros(()))):
        raise ValueError(
            f"{owner} was made inside jit, vmap or grad: make sets outside, where their matrices "
            "can be checked and factored once, and pass them in."
        )
