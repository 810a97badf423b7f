"""What every set answers, the unconstrained set, and the checks that all sets share."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import all_finite, axpy, is_concrete

MOVES_WITH_X = "this set moves with x (it has a coupling h(x)): pass x, as in project(y, x)."


class AbstractSet(eqx.Module):
    """An affine subspace of pytrees, possibly moving with x."""

    @abc.abstractmethod
    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        """The nearest point of the set at x to y."""

    @abc.abstractmethod
    def tangent(self, v: PyTree) -> PyTree:
        """The part of the direction v along which the set extends: P v."""

    @abc.abstractmethod
    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        """A particular point of the set at x, A^+ (c - h(x)), in the structure of `like`."""

    @abc.abstractmethod
    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        """A y + h(x) - c; where the set has no matrix, y - project(y)."""

    @property
    def coupled(self) -> bool:
        """Whether the set moves with x."""
        return False

    @property
    def constrained(self) -> bool:
        """Whether the set is less than the whole space."""
        return True

    @property
    def everyone(self) -> bool:
        """Whether a projection is agreement between all clients, in every round."""
        return False

    @property
    def federated(self) -> bool:
        """Whether a projection crosses clients, and so is a communication round."""
        return False

    @property
    def per_client(self) -> bool:
        """Whether the leading axis of every leaf of a point is the client axis."""
        return False

    def largest(self, values: Array) -> Array:
        """The largest of some numbers, one for each client where there are clients."""
        return jnp.max(values)

    def summed(self, values: Array) -> Array:
        """Their sum."""
        return jnp.sum(values)

    def for_round(self, key: PRNGKeyArray) -> "AbstractSet":
        """The set as one projection sees it; with partial participation, some of the clients."""
        return self

    def directions(self) -> "AbstractSet":
        """The directions along which the set extends, as a set: its projection is `tangent`."""
        return Directions(self)

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        """project(y - correction), where the correction has no part along the set."""
        return self.project(axpy(y, -1, correction))

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        """`new`, but `old` for clients that took no part in the round."""
        return new

    def message_size(self, y: PyTree) -> int:
        """The bytes that one client sends of y in a projection; 0 where nothing is sent."""
        return 0

    def at(self, x: PyTree) -> "AbstractSet":
        """The set with x fixed: loops over y then compute its anchor once."""
        return self

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        """y itself, but with the derivative d anchor / dx: how a point of the set moves with x.

        The value of MATH's `y + anchor(x) - stop(anchor(x))`.
        """
        return y

    def cotangent(self, gradient: PyTree) -> PyTree:
        """P' g, the transpose of `tangent`; the same thing unless the mean is weighted."""
        return self.tangent(gradient)

    def riesz(self, gradient: PyTree) -> PyTree:
        """The direction of a gradient in the inner product in which `project` is orthogonal."""
        return gradient

    def example(self) -> PyTree | None:
        """Zeros in the structure of a point, where the set alone knows it; else None."""
        return None

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        """Raises `ValueError` when y does not fit, or when the set is empty at x."""


def describe_shapes(tree: PyTree) -> str:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)


def total_size(tree: PyTree) -> int:
    return sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree))


def largest(tree: PyTree) -> float:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.size(leaf)]
    return max((float(np.max(np.abs(np.asarray(leaf)))) for leaf in leaves), default=0.0)


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
    # A new array tells whether someone is tracing, also when the matrices themselves are known.
    if not is_concrete((value, jnp.zeros(()))):
        raise ValueError(
            f"{owner} was made inside jit, vmap or grad: make sets outside, where their matrices "
            "can be checked and factored once, and pass them in."
        )


@jax.custom_jvp
def attach(y: Array, anchor: Array) -> Array:
    """y in value, y + anchor in derivative; so XLA drops the anchor's own value."""
    return y


@attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


class Directions(AbstractSet):
    """The linear subspace parallel to a set."""

    base: AbstractSet

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.tangent(y)

    def tangent(self, v: PyTree) -> PyTree:
        return self.base.tangent(v)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return jnp.zeros(()) if like is None else optax.tree.zeros_like(like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.base.tangent(y))

    def for_round(self, key: PRNGKeyArray) -> "Directions":
        return Directions(self.base.for_round(key))

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        return self.base.keep_absent(new, old)


class Free(AbstractSet):
    """The whole space: no constraint.

    !!! example
        ```python
        aipod.Free().project(y) is y
        ```
    """

    @property
    def constrained(self) -> bool:
        return False

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return y

    def tangent(self, v: PyTree) -> PyTree:
        return v

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return jnp.zeros(()) if like is None else optax.tree.zeros_like(like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.zeros_like(y)
