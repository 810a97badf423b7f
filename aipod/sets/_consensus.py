"""Agreement between clients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.shuffle import some_of
from aipod._misc.tree import to_device
from aipod.sets._agreement import (
    AbstractAgreement,
    AbstractRound,
    beside,
    bytes_of_one_client,
    permuted,
)
from aipod.sets._inputs import (
    as_number,
    real_array,
    require_concrete,
    require_range,
    total_size,
)
from aipod.sets._set import AbstractSet
from aipod.sets._shared import Cohort, Shared
from aipod.sets._types import typed_like, widened


class Consensus(AbstractAgreement):
    """All clients agree: y_1 = ... = y_M along the leading axis of every leaf.

    Projection is the mean over clients, broadcast: a communication round (`A-V2`, `proj_y_fed`).
    With weights the mean is weighted; it is then the orthogonal projection in the inner product
    sum_m w_m <u_m, v_m>, and `riesz` turns an ordinary gradient into a direction there.

    With `participation` below 1 some of the clients take part, a random subset that always has the
    same size. Points are averaged over the clients present, so nothing moves where all clients
    agree. Directions are averaged so that the result is unbiased for the mean over all clients.
    Absent clients keep their corrections. The corrections then still sum to zero, and a solution
    stays a fixed point.

    Methods with one round per outer step, such as E3-AiPOD, choose the clients of each outer step,
    and the others compute nothing. With several rounds in an outer step `chosen` decides.

    **Arguments:**

    - `weights`: one positive number for each client; only their ratios count.
    - `participation`: the share of clients that take part, in (0, 1]; at least two clients.
    - `chosen`: "round" chooses them anew for every round, and all clients make the local steps.
        "step" chooses a cohort for a whole outer step, and no others compute anything. That is
        cheaper, but y and the adjoint are then those of the cohort, and where clients differ the
        mean of these is not that of all clients: x stays away from the solution by a distance
        that no step size removes.

    !!! example
        ```python
        aipod.Consensus().project(jnp.array([[1.0], [3.0]]))  # [[2.], [2.]]
        ```
    """

    weights: Array | None
    participation: float = eqx.field(static=True)
    chosen: str = eqx.field(static=True)

    def __init__(
        self,
        weights: ArrayLike | None = None,
        participation: float = 1.0,
        chosen: str = "round",
    ) -> None:
        self.participation = as_share(participation)
        if chosen not in ("round", "step"):
            raise ValueError(f"chosen must be 'round' or 'step', got {chosen!r}.")
        self.chosen = chosen
        self.weights = None if weights is None else _as_weights(weights)

    def _each(self, function: Callable[[Array], Array], tree: PyTree) -> PyTree:
        """A function of every leaf, in working precision."""
        self._require_clients(tree, "this set")
        return typed_like(jax.tree.map(function, widened(tree)), tree)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.tangent(y)

    def tangent(self, v: PyTree) -> PyTree:
        weights = self.weights

        def mean(leaf: Array) -> Array:
            if weights is None:
                average = jnp.mean(leaf, axis=0, keepdims=True)
            else:
                average = jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1)[None]
            return jnp.broadcast_to(average, leaf.shape)

        return self._each(mean, v)

    def cotangent(self, gradient: PyTree) -> PyTree:
        weights = self.weights
        if weights is None:
            return self.tangent(gradient)
        return self._each(
            lambda leaf: beside(weights, leaf) * jnp.sum(leaf, axis=0, keepdims=True), gradient
        )

    def riesz(self, gradient: PyTree) -> PyTree:
        weights = self.weights
        if weights is None:
            return gradient
        return self._each(lambda leaf: leaf / (leaf.shape[0] * beside(weights, leaf)), gradient)

    def pass_on(self, v: PyTree, key: PRNGKeyArray) -> PyTree:
        if self.weights is not None:
            raise ValueError(
                "Consensus with weights cannot hand a client's vector to another client, who is "
                "uniformly random: leave the weights out, or use another method than aipod.FedMBO."
            )
        return permuted(v, key)

    @property
    def everyone(self) -> bool:
        return self.participation == 1

    @property
    def averages(self) -> bool:
        return self.everyone

    @property
    def cohorts(self) -> bool:
        return self.participation < 1 and self.chosen == "step"

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        clients = self._require_clients(point, "this set")
        rank = total_size(point) // clients * (clients - 1) if clients else 0
        return rank, rank

    def message_size(self, y: PyTree) -> int:
        self._require_clients(y, "this set")
        return round(self.participation * bytes_of_one_client(y))

    def present(self, clients: int) -> int:
        """How many of the clients take part in a round."""
        return max(1, round(self.participation * clients))

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return self if self.participation == 1 else _SomeClients(self, key)

    def once(self, clients: int) -> AbstractSet:
        return Shared(clients, members=self.present(clients))

    def cohort(
        self, chosen: Array, clients: int, members: int, axis: str | None = None
    ) -> AbstractSet:
        weights, rows = self.weights, chosen.shape[0]
        present = None if rows == members else jnp.arange(rows) < members
        if weights is None and present is None:
            return Cohort(None, float(members), members, members < clients, axis)
        shares = jnp.ones(rows) if weights is None else clients * weights[chosen]
        if present is not None:
            shares = jnp.where(present, shares, 0.0)
        return Cohort(shares, jnp.sum(shares), members, members < clients, axis)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.project(y))

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        clients = self._require_clients(y, name)
        if not clients:
            raise ValueError(f"{name} is Consensus, but the point holds no clients.")

    def check_corrections(self, y: PyTree, *, name: str = "set") -> None:
        clients = self._require_clients(y, name)
        if self.present(clients) == 1 < clients:
            # The corrections of all clients sum to zero, and absent clients keep theirs. So the
            # only client present cannot change its own: ProxSkip would never correct anything.
            enough = f"{2 / clients:.3g} or more" if clients > 2 else "1"
            raise ValueError(
                f"{name} is Consensus with participation={self.participation:.3g}: only one of "
                f"{clients} clients would take part in a round, and one alone cannot correct its "
                f"drift. Choose participation={enough}, so that at least two take part."
            )

    def _require_clients(self, tree: PyTree, name: str) -> int:
        """The number of clients; 0 where a tree has no leaves."""
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
        counts = {shape[0] if shape else None for shape in shapes}
        if self.weights is not None and shapes:
            counts.add(self.weights.shape[0])
        if len(counts) > 1 or None in counts:
            weighted = "" if self.weights is None else f" for {self.weights.shape[0]} weights"
            raise ValueError(
                f"{name} is Consensus{weighted}: the leading axis of every leaf must be the client "
                f"axis, of one length, but the shapes are {shapes}."
            )
        return counts.pop() or 0 if counts else 0


def as_share(participation: Any, kind: str = "clients") -> float:
    """A share in (0, 1] of clients or of links, or `ValueError`."""
    try:
        share = as_number(participation, "participation")
    except ValueError:
        share = float("nan")
    if not 0 < share <= 1:
        raise ValueError(
            f"participation must be a share of the {kind} in (0, 1], got {participation!r}."
        )
    return share


def _as_weights(weights: ArrayLike) -> Array:
    """The weights, divided by their sum."""
    require_concrete(weights, "Consensus")
    array = real_array(weights, "weights")
    if array.ndim != 1 or array.size == 0 or not np.all((array > 0) & np.isfinite(array)):
        raise ValueError(
            "weights must be a vector with one positive number for each client; leave a "
            "client out of the federation rather than giving it weight 0."
        )
    require_range(array, "weights", jnp.result_type(float))
    value = to_device(array)
    shares = value / jnp.sum(value)
    if not bool(jnp.all(shares > 0)):
        raise ValueError(
            f"weights divided by their sum do not fit {value.dtype}: bring them nearer to 1."
        )
    return shares


class _SomeClients(AbstractRound):
    """Consensus in one round, with some clients absent."""

    base: Consensus
    key: PRNGKeyArray

    def _present(self, clients: int) -> Array:
        """1 for each client in the round, else 0."""
        chosen = some_of(self.key, clients, self.base.present(clients))
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

        return self.base._each(average, y)

    def tangent(self, v: PyTree) -> PyTree:
        def estimate(leaf: Array) -> Array:
            clients = leaf.shape[0]
            present = self._present(clients)
            return self._combine(self._shares(clients) * clients / jnp.sum(present), leaf)

        return self.base._each(estimate, v)

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        def choose(a: Array, b: Array) -> Array:
            return jnp.where(beside(self._present(a.shape[0]), a) > 0, a, b)

        return jax.tree.map(choose, new, old)
