"""A federation as one `Bilevel` problem."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.functions import keep, release
from aipod._misc.tree import is_numeric
from aipod.federated._data import client_samples, stacked_data
from aipod.federated._partition import check_clients
from aipod.problem import Bilevel, ClientBatch, Objective, rebuilt
from aipod.sets import AbstractSet, AgreedWithin, Consensus, as_gossip


def replicate(tree: PyTree, clients: int) -> PyTree:
    """The tree once for each client, on a new leading axis.

    !!! example
        ```python
        x0 = aipod.federated.replicate(jnp.zeros(3), clients=10)  # shape (10, 3)
        ```
    """
    check_clients(clients)
    tree = keep(tree)
    odd = [leaf for leaf in jax.tree.leaves(tree) if not is_numeric(leaf)]
    if odd:
        raise ValueError(
            f"replicate: the tree holds a {type(odd[0]).__name__}, and clients hold arrays alone: "
            "keep it out, as with equinox.partition(model, equinox.is_inexact_array)."
        )
    return release(
        jax.tree.map(
            lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (clients, *jnp.shape(leaf))), tree
        )
    )


def average(tree: PyTree, weights: ArrayLike | None = None) -> PyTree:
    """The mean over clients, without the client axis: the model to evaluate or to keep.

    Looking at it is not a communication round of the algorithm, and is not counted as one.

    !!! example
        ```python
        model = aipod.federated.average(solution.y)
        ```
    """
    tree = keep(tree)
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(is_numeric(leaf) and jnp.ndim(leaf) for leaf in leaves):
        raise ValueError("average takes a pytree of arrays with the clients on their first axis.")
    if weights is None:
        return release(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree))
    shares = jnp.asarray(weights, float) / jnp.sum(jnp.asarray(weights, float))
    return release(
        jax.tree.map(lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, 1), tree)
    )


def _per_client(value: Callable[[Any], Array], data: PyTree, weights: Array | None) -> Array:
    """The loss of one client; where examples are weighted, the weighted mean of their losses."""
    if weights is None:
        return value(data)
    one_by_one = jax.vmap(lambda example: value(jax.tree.map(lambda leaf: leaf[None], example)))
    return jnp.sum(weights * one_by_one(data))


def _each(function: Callable[..., Any], points: tuple[PyTree, ...], *batches: PyTree) -> Any:
    """function(*points, *batches) for each client; a point may be kept once for all of them."""
    clients = {leaf.shape[0] for leaf in jax.tree.leaves(batches)}
    several = clients != {1}

    def once(point: PyTree) -> bool:
        return several and all(jnp.shape(leaf)[0] == 1 for leaf in jax.tree.leaves(point))

    common = [once(point) for point in points]
    parts = [
        jax.tree.map(lambda leaf: leaf[0], point) if alone else point
        for point, alone in zip(points, common, strict=True)
    ]
    axes = [None if alone else 0 for alone in common] + [0] * len(batches)
    return jax.vmap(function, in_axes=tuple(axes))(*parts, *batches)


class _ClientSum(eqx.Module):
    """sum_m M w_m loss(x_m, y_m, batch_m).

    The sum rather than the mean leaves every minimiser where it is and makes each client's
    gradient that of its own loss, so that local step sizes do not depend on the number of clients.
    """

    loss: Callable[..., Array]
    scale: Array | None
    takes_common: ClassVar[bool] = True

    def __call__(self, first: PyTree, y: PyTree, batch: ClientBatch) -> Array:
        return jnp.sum(self.each(first, y, batch))

    def each(self, first: PyTree, y: PyTree, batch: ClientBatch) -> Array:
        """The terms of the sum."""

        def one(first: PyTree, y: PyTree, data: PyTree, weights: Array | None) -> Array:
            return _per_client(lambda part: self.loss(first, y, part), data, weights)

        losses = _each(one, (first, y), batch.data, batch.weights)
        return losses if self.scale is None else self.scale.astype(losses.dtype) * losses

    def take(self, chosen: Array, members: int) -> "_ClientSum":
        return _ClientSum(self.loss, _taken(self.scale, chosen, members))

    def by_client(self) -> "_ClientSum":
        mask = jax.tree.map(lambda _: False, self)
        return mask if self.scale is None else dataclasses.replace(mask, scale=True)


class _ClientHead(eqx.Module):
    """The same sum for the head of a `Composite`, whose features come with the examples."""

    head: Callable[..., Array]
    scale: Array | None
    takes_common: ClassVar[bool] = True

    def __call__(self, features: PyTree, y: PyTree, batch: ClientBatch) -> Array:
        return jnp.sum(self.each(features, y, batch))

    def each(self, features: PyTree, y: PyTree, batch: ClientBatch) -> Array:
        """The terms of the sum."""

        def one(y: PyTree, data: PyTree, weights: Array | None) -> Array:
            return _per_client(lambda part: self.head(part[0], y, part[1]), data, weights)

        losses = _each(one, (y,), (features, batch.data), batch.weights)
        return losses if self.scale is None else self.scale.astype(losses.dtype) * losses

    def take(self, chosen: Array, members: int) -> "_ClientHead":
        return _ClientHead(self.head, _taken(self.scale, chosen, members))

    def by_client(self) -> "_ClientHead":
        mask = jax.tree.map(lambda _: False, self)
        return mask if self.scale is None else dataclasses.replace(mask, scale=True)


class _ClientFeatures(eqx.Module):
    features: Callable[[PyTree, Any], PyTree]
    takes_common: ClassVar[bool] = True

    def __call__(self, x: PyTree, batch: ClientBatch) -> PyTree:
        return _each(self.features, (x,), batch.data)

    def take(self, chosen: Array, members: int) -> "_ClientFeatures":
        return self


def _taken(scale: Array | None, chosen: Array, members: int) -> Array | None:
    """The factors of the chosen clients; 0 for those beyond the first `members`."""
    if members == chosen.shape[0]:
        return None if scale is None else scale[chosen]
    taken = jnp.ones(chosen.shape) if scale is None else scale[chosen]
    return jnp.where(jnp.arange(chosen.shape[0]) < members, taken, 0.0)


def _summed(objective: Objective, scale: Array | None) -> Objective:
    return rebuilt(
        objective,
        lambda loss: _ClientSum(loss, scale),
        _ClientFeatures,
        lambda head: _ClientHead(head, scale),
    )


def agreed(agreement: AbstractSet, within: AbstractSet | None, name: str) -> AbstractSet:
    """The agreement of clients, on a point of a set where one is given."""
    if within is None:
        return agreement
    # What the lower set moves with is x; the upper set has nothing to move with.
    point, still = ("x", " that does not move") if name == "upper_set" else ("y", "")
    wrong = not isinstance(within, AbstractSet) or within.federated
    if wrong or (still and within.coupled):
        raise ValueError(
            f"{name} must be a set for one client's {point}{still}, such as aipod.Simplex() or "
            f"aipod.Box(0.0), got {type(within).__name__}."
        )
    return AgreedWithin(agreement, within)


def _gossiping(
    graph: Any, clients: int, participation: float, chosen: str, lower_set: AbstractSet | None
) -> AbstractSet:
    if lower_set is not None:
        raise ValueError(
            "lower_set and graph do not go together: which bounds hold is decided from one average "
            "of all clients, which there is not without a server. Leave one of them out."
        )
    if chosen != "round":
        raise ValueError("chosen is about clients, but with graph= links fail: leave chosen out.")
    gossip = as_gossip(graph, clients, participation)
    if gossip.clients != clients:
        raise ValueError(
            f"graph has {gossip.clients} clients, but the data are those of {clients}."
        )
    return gossip


def federate(
    upper: Objective,
    lower: Objective,
    upper_data: PyTree,
    lower_data: PyTree,
    *,
    batch_size: int | None,
    weights: ArrayLike | None = None,
    participation: float = 1.0,
    chosen: str = "round",
    upper_set: AbstractSet | None = None,
    lower_set: AbstractSet | None = None,
    epochs: bool = False,
    on_host: bool = False,
    graph: Any = None,
) -> Bilevel:
    """The federated problem (`eq:fed bilevel`): every client has its own losses' data, x and y.

    x and y get a leading client axis (see `replicate`); both sets are `Consensus`, a projection
    is an average over clients and is counted as a communication round.

    **Arguments:**

    - `upper`, `lower`: the losses of one client, (x, y, batch) -> scalar, means over the batch;
        a `Composite` has its features computed once per outer step.
    - `upper_data`, `lower_data`: pytrees of arrays with axes (client, example, ...), or a list
        with one pytree for each client, of any lengths.
    - `batch_size`: examples of each client in a batch; None for all of them, no noise.
    - `weights`: one number for each client in place of 1 / M.
    - `participation`: the share of clients that take part.
    - `chosen`: whether they are chosen anew for every "round" or for every outer "step", with
        methods that have several rounds in one; see `Consensus`.
    - `upper_set`: a set that the common x must lie in, such as `aipod.Simplex()`; projecting on it
        costs no round. With `graph` it takes plain steps on x, `E3AiPOD(upper_lr=...)`.
    - `lower_set`: the same for the common y; its bounds may be functions of one client's x.
    - `epochs`: each client visits every one of its examples once before the next time; see
        `aipod.Minibatches`.
    - `on_host`: leave the data in host memory, or on disk where it is memory-mapped; a batch or a
        cohort is sent to the device when it is needed. See `aipod.HostClientMinibatches`.
    - `graph`: the links between clients, where there is no server: both sets are then
        `aipod.Gossip(graph)`, and `participation` is the share of the links that work in a round.
        A `Gossip`, or a graph as it takes them, such as "ring".

    !!! example
        ```python
        problem = aipod.federated.federate(f, g, val, train, batch_size=64)
        x0 = aipod.federated.replicate(x, clients=50)
        ```
    """
    samples = []
    for name, data in (("upper_data", upper_data), ("lower_data", lower_data)):
        stacked, counts = stacked_data(data, name)
        samples.append(client_samples(stacked, batch_size, counts, epochs=epochs, on_host=on_host))
    clients = {one.clients for one in samples}
    if len(clients) != 1:
        raise ValueError(
            f"upper_data has {samples[0].clients} clients, but lower_data has {samples[1].clients}."
        )
    consensus = Consensus(weights, 1.0 if graph is not None else participation, chosen)
    scale = None
    if consensus.weights is not None:
        if consensus.weights.shape[0] not in clients:
            raise ValueError(
                f"weights must have one number for each client, {samples[0].clients} of them, got "
                f"{consensus.weights.shape[0]}."
            )
        scale = consensus.weights * samples[0].clients
    if graph is not None:
        agreement = _gossiping(graph, samples[0].clients, participation, chosen, lower_set)
        sets = (agreed(agreement, upper_set, "upper_set"), agreement)
    else:
        sets = (
            agreed(consensus, upper_set, "upper_set"),
            agreed(consensus, lower_set, "lower_set"),
        )
    return Bilevel(
        upper=_summed(upper, scale),
        lower=_summed(lower, scale),
        upper_set=sets[0],
        lower_set=sets[1],
        upper_samples=samples[0],
        lower_samples=samples[1],
    )
