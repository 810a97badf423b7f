"""Numbers that a set is given, which may be functions of x: bounds and totals."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod._misc.tree import all_finite, is_concrete, same_structure, to_device
from aipod.sets._inputs import describe_shapes, is_real, real_array, require_range


class Moving(eqx.Module):
    """A number, an array or a pytree of arrays; or a function of x that returns one of them."""

    value: PyTree  # None where there is a function
    function: Callable[[PyTree], PyTree] | None
    name: str = eqx.field(static=True)

    @property
    def coupled(self) -> bool:
        return self.function is not None

    def at(self, x: PyTree) -> PyTree:
        """The value at x."""
        if self.function is None:
            return self.value
        if x is None:
            raise ValueError(
                f"this set moves with x ({self.name} is a function of it): pass x, as in "
                "project(y, x)."
            )
        return jax.tree.map(jnp.asarray, self.function(x))

    def fixed(self, x: PyTree) -> "Moving":
        """The same with x fixed."""
        return Moving(self.at(x), None, self.name)

    def over(self, like: PyTree, x: PyTree) -> PyTree:
        """The value at x for every entry of a point."""
        value = self.at(x)
        if same_structure(value, 0.0) and jnp.shape(value) == ():
            return jax.tree.map(lambda leaf: jnp.broadcast_to(value, jnp.shape(leaf)), like)
        if not same_structure(value, like) or not _fill(value, like):
            raise ValueError(
                f"{self.name} has shape {describe_shapes(value)}, but the point has shape "
                f"{describe_shapes(like)}: give one number, or the structure of the point with a "
                "number or an array of the same shape for each array."
            )
        return jax.tree.map(lambda v, leaf: jnp.broadcast_to(v, jnp.shape(leaf)), value, like)

    def check(self, x: PyTree, name: str) -> bool:
        """Whether the value is known at x; `ValueError` where the function does not fit."""
        if self.function is None:
            return is_concrete(self.value)
        where = f"{name}: {self.name}"
        try:
            shapes = jax.eval_shape(self.function, x) if x is not None else None
        except Exception as error:
            raise ValueError(
                f"{where} must be a function of x alone that jax.jit can trace, but it raised "
                f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            ) from error
        if not all(is_real(leaf.dtype) for leaf in jax.tree.leaves(shapes)):
            raise ValueError(f"{where} is not real: return real numbers.")
        if x is None or not is_concrete(x):
            return False
        if any(np.isnan(leaf).any() for leaf in jax.tree.leaves(known(self.at, x))):
            raise ValueError(f"{where} is NaN at the given x: start from an x where it is not.")
        return True


def as_moving(value: Any, name: str) -> Moving:
    """A function of x as it is; anything else as arrays without NaN, or `ValueError`."""
    if callable(value):
        return Moving(None, value, name)
    if isinstance(value, list | tuple) and all(isinstance(v, float | int) for v in value):
        value = np.asarray(value)
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is None)
    if not leaves:
        raise ValueError(f"{name} must be a number, an array or a function of x.")
    return Moving(jax.tree.unflatten(structure, [_real(v, name) for v in leaves]), None, name)


def require_all_finite(moving: Moving) -> Moving:
    if moving.function is None and not all_finite(moving.value):
        raise ValueError(f"{moving.name} must be finite.")
    return moving


def known(function: Callable[..., PyTree], *arguments: Any) -> PyTree:
    """A function's value as arrays of NumPy, also where JAX is tracing something else."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, function(*arguments))


def _real(value: Any, name: str) -> Array:
    array = real_array(value, name)
    if np.isnan(array).any():
        raise ValueError(f"{name} holds NaN: clean it before making the set.")
    require_range(array[np.isfinite(array)], name, jnp.result_type(float))
    return to_device(array)


def _fill(value: PyTree, like: PyTree) -> bool:
    """Whether every leaf is a number, or has the shape of the point's."""
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(like), strict=True)
    return all(jnp.shape(v) in ((), jnp.shape(leaf)) for v, leaf in pairs)
