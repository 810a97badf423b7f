"""Agreement between clients."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.tree import all_finite
from aipod.sets._agreement import AbstractAgreement, AbstractRound, bytes_of_one_client
from aipod.sets._inputs import require_concrete, total_size
from aipod.sets._set import AbstractSet


def _beside(weights: Array, leaf: Array) -> Array:
    """The weights, shaped to multiply a leaf along its client axis."""
    return weights.reshape((-1,) + (1,) * (leaf.ndim - 1)).astype(leaf.dtype)


class Consensus(AbstractAgreement):
    """All clients agree: y_1 = ... = y_M along the leading axis of every leaf.

    Projection is the mean over clients, broadcast: a communication round (`A-V2`, `proj_y_fed`).
    With weights the mean is weighted; it is then the orthogonal projection in the inner product
    sum_m w_m <u_m, v_m>, and `riesz` turns an ordinary gradient into a direction there.

    With `participation` below 1 every round takes a fresh random subset of the clients, always of
    the same size. Points are averaged over the clients present, so nothing moves where all clients
    agree. Directions are averaged so that the result is unbiased for the mean over all clients.
    Absent clients keep their corrections. The corrections then still sum to zero, and a solution
    stays a fixed point.

    **Arguments:**

    - `weights`: one positive number for each client; only their ratios count.
    - `participation`: the share of clients in each round, in (0, 1].

    !!! example
        ```python
        aipod.Consensus().project(jnp.array([[1.0], [3.0]]))  # [[2.], [2.]]
        ```
    """

    weights: Array | None
    participation: float = eqx.field(static=True)

    def __init__(self, weights: ArrayLike | None = None, participation: float = 1.0) -> None:
        if not 0 < participation <= 1:
            raise ValueError(
                f"participation must be a share of the clients in (0, 1], got {participation}."
            )
        self.participation = float(participation)
        if weights is None:
            self.weights = None
            return
        require_concrete(weights, "Consensus")
        value = jnp.asarray(weights, float)
        if value.ndim != 1 or not bool(jnp.all(value > 0)) or not all_finite(value):
            raise ValueError(
                "weights must be a vector with one positive number for each client; leave a "
                "client out of the federation rather than giving it weight 0."
            )
        self.weights = value / jnp.sum(value)

    def _over_clients(self, combine: Callable[[Array], Array], tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(combine(leaf), leaf.shape), tree)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.tangent(y)

    def tangent(self, v: PyTree) -> PyTree:
        if self.weights is None:
            return self._over_clients(lambda leaf: jnp.mean(leaf, axis=0, keepdims=True), v)
        weights = self.weights
        return self._over_clients(
            lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1)[None], v
        )

    def cotangent(self, gradient: PyTree) -> PyTree:
        if self.weights is None:
            return self.tangent(gradient)
        weights = self.weights
        return jax.tree.map(
            lambda leaf: _beside(weights, leaf) * jnp.sum(leaf, axis=0, keepdims=True), gradient
        )

    def riesz(self, gradient: PyTree) -> PyTree:
        if self.weights is None:
            return gradient
        weights = self.weights
        return jax.tree.map(lambda leaf: leaf / (leaf.shape[0] * _beside(weights, leaf)), gradient)

    @property
    def everyone(self) -> bool:
        return self.participation == 1

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        clients = jnp.shape(jax.tree.leaves(point)[0])[0]
        rank = total_size(point) // clients * (clients - 1)
        return rank, rank

    def message_size(self, y: PyTree) -> int:
        return round(self.participation * bytes_of_one_client(y))

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return self if self.participation == 1 else _SomeClients(self, key)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.project(y))

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(y)]
        counts = {shape[0] if shape else None for shape in shapes}
        if self.weights is not None:
            counts.add(self.weights.shape[0])
        if len(counts) > 1 or None in counts:
            weighted = "" if self.weights is None else f" for {self.weights.shape[0]} weights"
            raise ValueError(
                f"{name} is Consensus{weighted}: the leading axis of every leaf must be the client "
                f"axis, of one length, but the shapes are {shapes}."
            )


class _SomeClients(AbstractRound):
    """Consensus in one round, with some clients absent."""

    base: Consensus
    key: PRNGKeyArray

    def _present(self, clients: int) -> Array:
        """1 for each client in the round, else 0."""
        count = max(1, round(self.base.participation * clients))
        chosen = jax.random.permutation(self.key, clients)[:count]
        return jnp.zeros(clients).at[chosen].set(1.0)

    def _shares(self, clients: int) -> Array:
        """The weights of the clients present, and 0 for the others."""
        weights = 1 / clients if self.base.weights is None else self.base.weights
        return weights * self._present(clients)

    def _combine(self, shares: Array, leaf: Array) -> Array:
        mean = jnp.tensordot(shares.astype(leaf.dtype), leaf, axes=1)
        return jnp.broadcast_to(mean[None], leaf.shape)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        def average(leaf: Array) -> Array:
            shares = self._shares(leaf.shape[0])
            return self._combine(shares / jnp.sum(shares), leaf)

        return jax.tree.map(average, y)

    def tangent(self, v: PyTree) -> PyTree:
        def estimate(leaf: Array) -> Array:
            clients = leaf.shape[0]
            present = self._present(clients)
            return self._combine(self._shares(clients) * clients / jnp.sum(present), leaf)

        return jax.tree.map(estimate, v)

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        def choose(a: Array, b: Array) -> Array:
            return jnp.where(_beside(self._present(a.shape[0]), a) > 0, a, b)

        return jax.tree.map(choose, new, old)
