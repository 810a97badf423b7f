"""Data types: sets compute in float32 or float64, and points keep the types that they came with."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree


def working_type(*values: Any) -> Any:
    """The data type to compute in: that of the values, but at least float32."""
    dtype = jnp.result_type(*values)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return jnp.promote_types(dtype, jnp.float32)


def widened(tree: PyTree[ArrayLike]) -> PyTree[Array]:
    """The leaves in their working types; sums in half precision would overflow or lose digits."""

    def wide(leaf: Any) -> Array:
        try:
            return jnp.asarray(leaf, working_type(leaf))
        except TypeError as error:
            kind = type(leaf).__name__
            raise ValueError(f"a point must hold arrays of real numbers, got {kind}.") from error

    return jax.tree.map(wide, tree)


def unified(tree: PyTree[ArrayLike]) -> PyTree[Array]:
    """`widened`, in one data type for all leaves."""
    wide = widened(tree)
    leaves = jax.tree.leaves(wide)
    dtype = working_type(*leaves) if leaves else None
    return jax.tree.map(lambda leaf: leaf.astype(dtype), wide)


def typed_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree in the floating types of another; where that holds integers, as it is."""

    def typed(leaf: Array, old: Any) -> Array:
        dtype = jnp.result_type(old)
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(dtype, jnp.inexact) else leaf

    return jax.tree.map(typed, tree, like)


def tolerance(tree: PyTree) -> float:
    """The relative error below which a residual is taken for rounding, from the roughest leaf."""
    types = [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)]
    found = [jnp.finfo(dtype).eps for dtype in types if jnp.issubdtype(dtype, jnp.floating)]
    return 100 * float(max(found, default=jnp.finfo(float).eps)) ** 0.75
