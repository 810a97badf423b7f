"""Checks of what the slots return, while a step is traced: a stranger's slot may be wrong."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from aipod._misc.keys import is_key
from aipod._misc.tree import is_numeric, same_structure
from aipod.slots._cost import Cost


def returned(slot: Any, method: str, found: Any, names: tuple[str, ...], like: PyTree) -> Any:
    """`found`, when it is what a slot's method must return; else `ValueError`.

    **Arguments:**

    - `names`: the parts of the tuple, the first like a part of the state, then the slot's state,
        then, if there is a third, the cost.
    - `like`: what the first two must be like, in structure, shapes and types.
    """
    where = f"{type(slot).__name__}.{method}"
    wanted = f"({', '.join(names)})"
    if not isinstance(found, tuple) or len(found) != len(names):
        what = "one array" if isinstance(found, jax.Array) else type(found).__name__
        what = f"{len(found)} values" if isinstance(found, tuple) else what
        raise ValueError(f"{where} must return {wanted}, but it returns {what}.")
    for name, value, old in zip(names[:2], found[:2], like, strict=True):
        _check_like(f"{where} returns {name}", value, old)
    if len(names) == 3 and isinstance(found[2], Cost):
        for field, value in vars(found[2]).items():
            if field == "memory":
                continue
            if not is_numeric(value) or jnp.ndim(value):
                raise ValueError(
                    f"{where} returns a Cost whose {field} is {value!r}: give one whole number."
                )
    if len(names) == 3 and not isinstance(found[2], Cost):
        raise ValueError(
            f"{where} must return an aipod.Cost as its third value, but it returns a "
            f"{type(found[2]).__name__}: use turn.lower_cost(...) or turn.upper_cost(...)."
        )
    return found


def like_before(slot: Any, method: str, found: PyTree, like: PyTree) -> PyTree:
    """`found`, when it is a state like the one before; else `ValueError`."""
    _check_like(f"{type(slot).__name__}.{method} returns a state", found, like)
    return found


def initial(slot: Any, state: PyTree) -> PyTree:
    """`state`, when it is a pytree of arrays that a slot may keep; else `ValueError`."""
    what = f"{type(slot).__name__}.init returns a state"
    _check_arrays(what, state, "a state is a pytree of arrays, or None")
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jnp.asarray(leaf), state)


def _check_arrays(what: str, tree: PyTree, remedy: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if not is_numeric(leaf) and not is_key(leaf):
            raise ValueError(f"{what} with a {type(leaf).__name__} in it: {remedy}.")


def _check_like(what: str, value: PyTree, old: PyTree) -> None:
    if not same_structure(value, old):
        raise ValueError(
            f"{what} with the structure {jax.tree.structure(value)}, but it was "
            f"{jax.tree.structure(old)} before the step: keep the structure that init returns."
        )
    _check_arrays(what, value, "give arrays")
    leaves = jax.tree_util.tree_leaves_with_path(value)
    for (path, leaf), before in zip(leaves, jax.tree.leaves(old), strict=True):
        now, then = jax.typeof(leaf), jax.typeof(before)
        if (now.shape, now.dtype) != (then.shape, then.dtype):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"{what} whose entry {name or 'itself'} is {now.dtype}{list(now.shape)}, but was "
                f"{then.dtype}{list(then.shape)} before the step: keep shapes and types, as with "
                ".astype."
            )
