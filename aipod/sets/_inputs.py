"""Checks of what sets are made from, and descriptions of it for messages."""

import numbers
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


def is_real(dtype: Any) -> bool:
    """Whether a data type is one of real numbers: booleans, integers or floating point."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def require_finite(value: Any, name: str) -> None:
    if not all_finite(value):
        raise ValueError(f"{name} holds NaN or infinity: clean it before making the set.")


def require_range(value: np.ndarray, name: str, dtype: Any) -> None:
    """Raises `ValueError` where finite numbers would become infinite in a data type."""
    limit = float(jnp.finfo(dtype).max)
    if largest(value) > limit:
        raise ValueError(
            f"{name} holds numbers beyond {limit:.3g}, the largest of {jnp.dtype(dtype)}: rescale "
            "it, or use float64 (jax_enable_x64)."
        )


def real_array(value: Any, name: str) -> np.ndarray:
    """An array of NumPy that holds real numbers, or `ValueError`."""
    if np.ma.is_masked(value):
        raise ValueError(f"{name} has masked entries: fill them, as in {name}.filled(0).")
    try:
        array = np.asarray(value)
        real = is_real(array.dtype)
    except (TypeError, ValueError):  # a ragged list, a random key
        real = False
    if not real:
        kind = type(value).__name__
        raise ValueError(f"{name} must be a number or an array of real numbers, got {kind}.")
    return array


def as_real_array(value: Any, name: str, *, dtype: Any = float) -> np.ndarray:
    """`real_array`, of finite numbers within the range of dtype."""
    array = real_array(value, name)
    require_finite(array, name)
    require_range(array, name, jnp.result_type(dtype))
    return array


def as_reals(value: Any, name: str) -> Any:
    """The leaves of value as finite real arrays of NumPy, or `ValueError`."""
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is None)
    if not leaves:
        raise ValueError(
            f"{name} must be a number or an array of real numbers, got {type(value).__name__}."
        )
    return jax.tree.unflatten(structure, [as_real_array(leaf, name) for leaf in leaves])


def as_number(value: Any, name: str) -> float:
    """One finite real number as a float; booleans, text and longer arrays raise `ValueError`."""
    plain = isinstance(value, numbers.Real) and not isinstance(value, bool)
    array = isinstance(value, np.ndarray | jax.Array) and not jnp.issubdtype(value.dtype, jnp.bool_)
    if not plain and not (array and value.shape == ()):
        shape = f" of shape {value.shape}" if array else ""
        raise ValueError(f"{name} must be one number, got {type(value).__name__}{shape}.")
    try:
        number = float(value) if plain else float(as_real_array(value, name))
    except OverflowError:  # an integer of hundreds of digits
        number = float("inf")
    require_finite(number, name)
    require_range(np.asarray(number), name, jnp.result_type(float))
    return number


def require_concrete(value: Any, owner: str) -> None:
    # Inside jit a new array is a tracer, also where all arguments are constants.
    if not is_concrete((value, jnp.zeros(()))):
        raise ValueError(
            f"{owner} was made inside jit, vmap or grad: make sets outside, where their matrices "
            "can be checked and factored once, and pass them in."
        )
