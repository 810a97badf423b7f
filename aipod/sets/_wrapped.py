"""Sets made of another set: its directions, and the set with x fixed."""

import equinox as eqx
import optax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod.sets._geometry import zero_anchor
from aipod.sets._set import AbstractSet


class AbstractWrapped(AbstractSet):
    """A set with the tangent space and the clients of another, its `base`."""

    base: eqx.AbstractVar[AbstractSet]

    def tangent(self, v: PyTree) -> PyTree:
        return self.base.tangent(v)

    def cotangent(self, gradient: PyTree) -> PyTree:
        return self.base.cotangent(gradient)

    def riesz(self, gradient: PyTree) -> PyTree:
        return self.base.riesz(gradient)

    @property
    def constrained(self) -> bool:
        return self.base.constrained

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return self.base.constraints(point)

    def example(self) -> PyTree | None:
        return self.base.example()

    @property
    def federated(self) -> bool:
        return self.base.federated

    @property
    def per_client(self) -> bool:
        return self.base.per_client

    @property
    def together(self) -> bool:
        return self.base.together

    @property
    def everyone(self) -> bool:
        return self.base.everyone

    @property
    def averages(self) -> bool:
        return self.base.averages

    @property
    def cohorts(self) -> bool:
        return self.base.cohorts

    def present(self, clients: int) -> int:
        return self.base.present(clients)

    def largest(self, values: Array) -> Array:
        return self.base.largest(values)

    def summed(self, values: Array) -> Array:
        return self.base.summed(values)

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        return self.base.keep_absent(new, old)

    def message_size(self, y: PyTree) -> int:
        return self.base.message_size(y)


class Directions(AbstractWrapped):
    """The linear subspace parallel to a set."""

    base: AbstractSet

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.tangent(y)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return zero_anchor(like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.base.tangent(y))

    def directions(self) -> "Directions":
        return self

    def for_round(self, key: PRNGKeyArray) -> "Directions":
        return Directions(self.base.for_round(key))


class Fixed(AbstractWrapped):
    """A set that moves with x, held where it is at one x."""

    base: AbstractSet
    x: PyTree

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.project(y, self.x)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return self.base.anchor(self.x, like=like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.residual(y, self.x)

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        return self.base.emptiness(self.x, like)

    def directions(self) -> AbstractSet:
        return self.base.directions()

    @property
    def affine(self) -> bool:
        return self.base.affine

    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> AbstractSet:
        if self.affine:
            return self
        found = self.base.face(y, correction, self.x, step=step, previous=previous)
        return found.at(self.x)

    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]:
        return self.base.land(y, self.x)

    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree:
        return self.base.sides(y, multipliers, self.x, previous=previous)

    def holding(self, active: PyTree) -> AbstractSet:
        return self if self.affine else self.base.holding(active).at(self.x)

    def for_round(self, key: PRNGKeyArray) -> "Fixed":
        return Fixed(self.base.for_round(key), self.x)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self.base.check(y, self.x, name=name)
