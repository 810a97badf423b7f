"""The right-hand side c - h(x) of a constraint A y + h(x) = c."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod._misc.tree import all_finite, is_concrete, same_structure, to_device
from aipod.sets._inputs import as_real_array, describe_shapes, fits, is_real, total_size


class LinearCoupling(eqx.Module):
    """h(x) = H x, with x ravelled; what `coupling=H` becomes when H is an array."""

    matrix: Array

    def __call__(self, x: PyTree) -> Array:
        flat = ravel_pytree(x)[0]
        if flat.shape[0] != self.matrix.shape[1]:
            raise ValueError(
                f"coupling is a matrix of shape {self.matrix.shape}, but x has {flat.shape[0]} "
                "entries: one column is needed for each."
            )
        return self.matrix @ flat


def as_coupling(coupling: Any) -> Callable[[PyTree], PyTree] | None:
    """A function h(x) as it is, a matrix H as x -> H x."""
    if coupling is None or callable(coupling):
        return coupling
    wanted = "coupling must be a function h(x) or a matrix H"
    if not isinstance(coupling, list | tuple) and not hasattr(coupling, "__array__"):
        raise ValueError(f"{wanted}, got {type(coupling).__name__}.")
    matrix = as_real_array(coupling, "coupling")
    if matrix.ndim != 2:
        raise ValueError(f"{wanted}, got an array of shape {matrix.shape}.")
    return LinearCoupling(to_device(matrix))


class RightHandSide(eqx.Module):
    """c - h(x); `coupling` is h, None where nothing moves with x."""

    target: PyTree
    coupling: Callable[[PyTree], PyTree] | None

    @property
    def coupled(self) -> bool:
        return self.coupling is not None

    def at(self, x: PyTree) -> PyTree:
        """Its value at x."""
        if self.coupling is None:
            return self.target
        if x is None:
            raise ValueError(
                "this set moves with x (it has a coupling h(x)): pass x, as in project(y, x)."
            )
        return optax.tree.sub(self.target, self._rows_of(self.coupling(x)))

    def fixed(self, x: PyTree) -> "RightHandSide":
        """The same with x fixed."""
        return RightHandSide(self.at(x), None)

    def check(self, x: PyTree, name: str) -> PyTree | None:
        """Its value at x, or `ValueError` where h(x) does not fit; None where x has no value."""
        if self.coupling is None:
            return self.target
        try:
            value = jax.eval_shape(self.coupling, x) if x is not None else None
        except Exception as error:
            if isinstance(self.coupling, LinearCoupling) and isinstance(error, ValueError):
                raise
            raise ValueError(
                f"{name}: the coupling must be a function of x alone that jax.jit can trace, but "
                f"h(x) raised {type(error).__name__}: "
                f"{(str(error).strip() or 'no message').splitlines()[0]}"
            ) from error
        if not all(is_real(leaf.dtype) for leaf in jax.tree.leaves(value)):
            raise ValueError(f"{name}: the coupling h(x) is not real: return real numbers.")
        jax.eval_shape(self.at, x)
        if not is_concrete((self, x)):
            return None
        known = self._known_at(x)
        if not all_finite(known):
            raise ValueError(
                f"{name}: the coupling h(x) is NaN or infinite at the given x: start from an x "
                "where it is finite, and look for a division by 0 in it."
            )
        return known

    def _known_at(self, x: PyTree) -> PyTree:
        """`at`, for an x that has a value; H x by NumPy, which has nothing to compile."""
        if isinstance(self.coupling, LinearCoupling):
            leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(x)]
            flat = np.concatenate(leaves)
            shift = self._rows_of(np.asarray(self.coupling.matrix) @ flat)
            return jax.tree.map(lambda c, h: np.asarray(c) - h, self.target, shift)
        with jax.ensure_compile_time_eval():
            return self.at(x)

    def _rows_of(self, value: PyTree) -> PyTree:
        """The coupling's value in the structure of c."""
        if not same_structure(value, self.target):
            value = ravel_pytree(value)[0]
        if describe_shapes(self.target) == "()":
            if total_size(value) == 1:
                return jnp.reshape(value, ())
            raise ValueError(
                f"coupling h(x) has shape {describe_shapes(value)}: it must return one number."
            )
        if not fits(value, self.target):
            raise ValueError(
                f"coupling h(x) has shape {describe_shapes(value)}, but c has shape "
                f"{describe_shapes(self.target)}: return one value for each row of A."
            )
        return value
