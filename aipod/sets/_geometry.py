"""The geometry of a set: where its points lie, and along which directions it extends."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


class AbstractGeometry(eqx.Module):
    """An affine subspace of pytrees that may move with x, {y : A y + h(x) = c}.

    With P the projection on Ker A and A^+ the pseudo-inverse,

        project(y, x) = P y + anchor(x),     tangent(v) = P v,     anchor(x) = A^+ (c - h(x)).

    The four abstract methods define the set. The others have answers for a set that does not move
    with x and whose projection is orthogonal in the usual inner product.
    """

    @abc.abstractmethod
    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        """The point of the set at x that is nearest to y."""

    @abc.abstractmethod
    def tangent(self, v: PyTree) -> PyTree:
        """P v, the part of the direction v along which the set extends."""

    @abc.abstractmethod
    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        """One point of the set at x, A^+ (c - h(x)), in the structure of `like`."""

    @abc.abstractmethod
    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        """A y + h(x) - c; for a set without a matrix, y - project(y). Zero exactly on the set."""

    @property
    def affine(self) -> bool:
        """Whether the set is an affine subspace, as above; a set with bounds is not."""
        return True

    @property
    def coupled(self) -> bool:
        """Whether the set moves with x."""
        return False

    @property
    def constrained(self) -> bool:
        """Whether the set is less than the whole space."""
        return True

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        """How many constraints the set puts on a point, and their rank; None where unknown."""
        return None, None

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        """How far the set is from having a point at x: min_y |A y + h(x) - c| over the size of c.

        Relative, in the largest entry; rounding error where the set has a point, and 0 where it
        always has one. A coupling can leave the range of A while x moves: `project` then returns a
        point that misses the constraint by this much. Usable under jit.

        **Arguments:**

        - `like`: a point, for sets that need to know its shape.
        """
        return jnp.zeros(())

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        """y + anchor(x) - stop_gradient(anchor(x)): y, moving with x as a point of the set does."""
        if not self.coupled:
            return y
        return jax.tree.map(_attach, y, self.anchor(x, like=y))

    def cotangent(self, gradient: PyTree) -> PyTree:
        """P' g, the transpose of `tangent`; differs from it only where a mean is weighted."""
        return self.tangent(gradient)

    def riesz(self, gradient: PyTree) -> PyTree:
        """The direction of a gradient in the inner product in which `project` is orthogonal."""
        return gradient

    def example(self) -> PyTree | None:
        """Zeros in the structure of a point; None where the set alone does not know it."""
        return None

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        """Raises `ValueError` when y does not fit, or when the set is empty at x."""


def zero_anchor(like: PyTree) -> PyTree:
    """The anchor of a set that contains zero."""
    return jnp.zeros(()) if like is None else jax.tree.map(jnp.zeros_like, like)


@jax.custom_jvp
def _attach(y: Array, anchor: Array) -> Array:
    """y in value, y + anchor in derivative. XLA then drops the anchor's value."""
    return y


@_attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]
