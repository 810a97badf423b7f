"""Agreement between clients, as an outer step sees it: one copy for all, a cohort, a mesh."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.sets._agreement import AbstractAgreement, beside, bytes_of_one_client, permuted
from aipod.sets._inputs import total_size
from aipod.sets._set import AbstractSet
from aipod.sets._types import typed_like, widened


class Shared(AbstractAgreement):
    """All clients agree, and a point is kept once: its client axis has length 1.

    The quotient of `Consensus`. A gradient at such a point is the sum of what would be the clients'
    own gradients, and XLA forms it without them. `riesz` makes the mean direction of it, which is
    what `Consensus` makes of the clients' directions. Nothing is left to project.

    - `clients`: how many there are.
    - `axis`: the axis of a device mesh over which they are spread; None for one device.
    - `members`: how many of them take part in an outer step; None for all.
    """

    clients: int = eqx.field(static=True)
    axis: str | None = eqx.field(static=True, default=None)
    members: int | None = eqx.field(static=True, default=None)

    def present(self, clients: int) -> int:
        return clients if self.members is None else self.members

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return y

    def tangent(self, v: PyTree) -> PyTree:
        return v

    def riesz(self, gradient: PyTree) -> PyTree:
        whole = _over_devices(widened(gradient), self.axis)
        return typed_like(jax.tree.map(lambda leaf: leaf / self.clients, whole), gradient)

    @property
    def everyone(self) -> bool:
        return True

    def largest(self, values: Array) -> Array:
        return _largest_over_devices(jnp.max(values), self.axis)

    def summed(self, values: Array) -> Array:
        return _over_devices(jnp.sum(values), self.axis)

    def pass_on(self, v: PyTree, key: PRNGKeyArray) -> PyTree:
        return v

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.zeros_like, y)

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        rank = total_size(point) * (self.clients - 1)
        return rank, rank

    def message_size(self, y: PyTree) -> int:
        return bytes_of_one_client(y)

    def once(self, clients: int) -> AbstractSet:
        return Shared(clients, self.axis)


class Cohort(AbstractAgreement):
    """Agreement of the clients of one outer step, all of them or some; everyone here is present.

    Points are averaged over the cohort, so nothing moves where its members agree. Directions are
    averaged so that the result is unbiased for the mean over all clients. The corrections of all
    clients together average to zero, those of a cohort do not: they are left out of projections,
    and what the cohort adds to its own still sums to zero.

    - `shares`: the weight of each member, in units of the mean weight of all clients; None where
        all have the same. Rows that only fill up a device have the weight 0.
    - `total`: the sum of the shares of the whole cohort.
    - `members`: how many it has.
    - `some`: whether other clients are absent.
    - `axis`: the axis of a device mesh over which it is spread; None for one device.
    """

    shares: Array | None
    total: Array | float
    members: int = eqx.field(static=True)
    some: bool = eqx.field(static=True, default=True)
    axis: str | None = eqx.field(static=True, default=None)

    @property
    def averages(self) -> bool:
        return not self.some

    @property
    def cohorts(self) -> bool:
        return self.some

    @property
    def everyone(self) -> bool:
        return not self.some

    def members_in_all(self, rows: int) -> int:
        return self.members

    def _sum(self, leaf: Array) -> Array:
        weighted = leaf if self.shares is None else beside(self.shares, leaf) * leaf
        whole = _over_devices(jnp.sum(weighted, axis=0, keepdims=True), self.axis)
        return jnp.broadcast_to(whole, leaf.shape)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        def mean(leaf: Array) -> Array:
            return self._sum(leaf) / jnp.asarray(self.total, leaf.dtype)

        return typed_like(jax.tree.map(mean, widened(y)), y)

    def tangent(self, v: PyTree) -> PyTree:
        def estimate(leaf: Array) -> Array:
            return self._sum(leaf) / self.members

        return typed_like(jax.tree.map(estimate, widened(v)), v)

    def riesz(self, gradient: PyTree) -> PyTree:
        if self.shares is None:
            return gradient
        # A row that fills up has no gradient either.
        shares = jnp.where(self.shares > 0, self.shares, 1.0)
        scaled = jax.tree.map(lambda leaf: leaf / beside(shares, leaf), widened(gradient))
        return typed_like(scaled, gradient)

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        return self.project(y)

    def pass_on(self, v: PyTree, key: PRNGKeyArray) -> PyTree:
        if self.axis is not None or self.shares is not None:
            raise ValueError(
                "clients of a mesh, or with weights, cannot hand a vector to one another, as "
                "aipod.FedMBO needs it: leave the mesh and the weights out."
            )
        return permuted(v, key)

    def largest(self, values: Array) -> Array:
        if self.shares is not None and values.shape == self.shares.shape:
            values = jnp.where(self.shares > 0, values, -jnp.inf)
        return _largest_over_devices(jnp.max(values), self.axis)

    def summed(self, values: Array) -> Array:
        if self.shares is not None and values.shape == self.shares.shape:
            values = jnp.where(self.shares > 0, values, 0.0)
        return _over_devices(jnp.sum(values), self.axis)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.subtract, y, self.project(y))

    def once(self, clients: int) -> AbstractSet:
        return Shared(clients, self.axis)

    def by_client(self) -> "Cohort":
        """True for what has a row for each client."""
        mask = jax.tree.map(lambda _: False, self)
        return mask if self.shares is None else dataclasses.replace(mask, shares=True)


def _over_devices(tree: PyTree, axis: str | None) -> PyTree:
    return tree if axis is None else jax.lax.psum(tree, axis)


def _largest_over_devices(value: Array, axis: str | None) -> Array:
    return value if axis is None else jax.lax.pmax(value, axis)
