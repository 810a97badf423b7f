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

from aipod._misc.tree import same_structure, to_device
from aipod.sets._inputs import describe_shapes, fits, require_finite, total_size


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
    matrix = to_device(coupling)
    if matrix.ndim != 2:
        raise ValueError(
            f"coupling must be a function h(x) or a matrix H, got an array of shape {matrix.shape}."
        )
    require_finite(matrix, "coupling")
    return LinearCoupling(matrix)


class RightHandSide(eqx.Module):
    """c - h(x); `coupling` is h, None where nothing moves with x."""

    target: PyTree
    coupling: Callable[[PyTree], PyTree] | None

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

    def known_at(self, x: PyTree) -> PyTree:
        """`at`, for an x that has a value; H x by NumPy, which has nothing to compile."""
        if isinstance(self.coupling, LinearCoupling):
            flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)])
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
