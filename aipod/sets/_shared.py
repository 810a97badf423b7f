"""Agreement between clients, with one copy of what all of them have."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.sets._agreement import AbstractAgreement, beside, bytes_of_one_client
from aipod.sets._inputs import total_size
from aipod.sets._set import AbstractSet
from aipod.sets._types import typed_like, widened


class Shared(AbstractAgreement):
    """All clients agree, and a point is kept once: its client axis has length 1.

    The quotient of `Consensus`. A gradient at such a point is the sum of what would be the clients'
    own gradients, and XLA forms it without them. `riesz` makes the mean direction of it, which is
    what `Consensus` makes of the clients' directions. Nothing is left to project.

    - `clients`: how many there are.
    """

    clients: int = eqx.field(static=True)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return y

    def tangent(self, v: PyTree) -> PyTree:
        return v

    def riesz(self, gradient: PyTree) -> PyTree:
        return typed_like(
            jax.tree.map(lambda leaf: leaf / self.clients, widened(gradient)), gradient
        )

    @property
    def everyone(self) -> bool:
        return True

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.zeros_like, y)

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        rank = total_size(point) * (self.clients - 1)
        return rank, rank

    def message_size(self, y: PyTree) -> int:
        return bytes_of_one_client(y)

    def once(self, clients: int) -> AbstractSet:
        return Shared(clients)


class Cohort(AbstractAgreement):
    """Agreement of some clients, those of one outer step; all of them are present.

    Points are averaged over the cohort, so nothing moves where its members agree. Directions are
    averaged so that the result is unbiased for the mean over all clients. The corrections of all
    clients together average to zero, those of a cohort do not: they are left out of projections,
    and what the cohort adds to its own still sums to zero.

    - `shares`: the weight of each member, in units of the mean weight of all clients; None where
        all have the same.
    """

    shares: Array | None

    def _shares(self, leaf: Array) -> Array | float:
        return 1.0 if self.shares is None else beside(self.shares, leaf)

    @property
    def cohorts(self) -> bool:
        return True

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        def mean(leaf: Array) -> Array:
            shares = self._shares(leaf)
            total = leaf.shape[0] if self.shares is None else jnp.sum(shares)
            average = jnp.sum(shares * leaf, axis=0, keepdims=True) / total
            return jnp.broadcast_to(average, leaf.shape)

        return typed_like(jax.tree.map(mean, widened(y)), y)

    def tangent(self, v: PyTree) -> PyTree:
        def estimate(leaf: Array) -> Array:
            average = jnp.mean(self._shares(leaf) * leaf, axis=0, keepdims=True)
            return jnp.broadcast_to(average, leaf.shape)

        return typed_like(jax.tree.map(estimate, widened(v)), v)

    def riesz(self, gradient: PyTree) -> PyTree:
        if self.shares is None:
            return gradient
        scaled = jax.tree.map(lambda leaf: leaf / self._shares(leaf), widened(gradient))
        return typed_like(scaled, gradient)

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        return self.project(y)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.subtract, y, self.project(y))

    def once(self, clients: int) -> AbstractSet:
        return Shared(clients)
