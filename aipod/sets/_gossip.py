"""Agreement without a server: clients average with their neighbours in a graph."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod.sets._agreement import AbstractAgreement, bytes_of_one_client
from aipod.sets._consensus import Consensus, as_share
from aipod.sets._exchange import Exchange, Links, links_of
from aipod.sets._graphs import (
    given_edges,
    given_weights,
    laplacian_spectrum,
    metropolis,
    named_edges,
    require_connected,
)
from aipod.sets._inputs import require_concrete
from aipod.sets._set import AbstractSet


class Gossip(AbstractAgreement):
    """All clients agree, but there is no server: each averages with its neighbours in a graph.

    The set is that of `Consensus`, and reference values such as `aipod.stationarity` are those of
    full averages. What a solver does in a round differs: clients exchange messages along the links,

        y <- V y_hat,   V = I - c (I - W),

    with W the symmetric, doubly stochastic matrix of averaging weights and c the largest number up
    to 1 for which V has no negative eigenvalue. (c = 1/2, that is V = (I + W) / 2, always does; a
    larger one is faster. On the complete graph c = 1, and V is the average.)

    One exchange does not make clients agree. E3-AiPOD corrects for that in x, y and u (exact
    diffusion, and gradient tracking where x is moved by an optimiser), and its fixed points are the
    solutions. Other methods mix where they would project, and stop near a solution.

    **Arguments:**

    - `graph`: the links, as a list of pairs of clients (0, 1, ...), as an adjacency matrix (NumPy,
        JAX or scipy.sparse), or by a name: "ring", "grid", "exponential" (client i is linked with
        i +- 1, 2, 4, 8, ...), "complete" or "erdos-renyi".
    - `clients`: how many there are, for a name.
    - `weights`: W, a matrix that is symmetric, doubly stochastic and not negative, whose entries
        off the diagonal are the links where `graph` is left out. By default Metropolis weights,
        1 / (1 + the larger number of neighbours of the two).
    - `participation`: the share of the links that work in a round, in (0, 1]; each fails by itself,
        in both directions, and its weight stays with its two clients.
    - `key`, `probability`: for "erdos-renyi", which links every two clients with this probability;
        by default 2 log(M) / (M - 1).

    !!! example
        ```python
        ring = aipod.Gossip("ring", clients=16)
        ring.gap  # 0.05: the spectral gap of W
        aipod.Gossip([(0, 1), (1, 2), (2, 3)], participation=0.9)
        ```
    """

    links: Links
    clients: int = eqx.field(static=True)
    participation: float = eqx.field(static=True)
    gap: float = eqx.field(static=True)
    complete: bool = eqx.field(static=True)

    def __init__(
        self,
        graph: Any = None,
        clients: int | None = None,
        *,
        weights: ArrayLike | None = None,
        participation: float = 1.0,
        key: PRNGKeyArray | None = None,
        probability: float | None = None,
    ) -> None:
        require_concrete((graph, weights), "Gossip")
        edges, shares, self.clients = _weighted(graph, clients, weights, key, probability)
        require_connected(edges, self.clients)
        self.gap, largest = laplacian_spectrum(edges, shares, self.clients)
        # Rounding must not make a weight of exactly 1 / M a little less.
        lazy = 1.0 if largest <= 1 + 1e-9 else 1 / largest
        self.links = links_of(edges, lazy * shares, self.clients)
        self.participation = as_share(participation, "links")
        self.complete = bool(self.gap >= 1 - 1e-9 and largest <= 1 + 1e-9)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return Consensus().project(y)

    def tangent(self, v: PyTree) -> PyTree:
        return Consensus().tangent(v)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.project(y))

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return Consensus().constraints(point)

    def mixing(self) -> np.ndarray:
        """V, with which clients average in a round in which all links work."""
        return np.asarray(Exchange(self.links, None, 1.0).project(jnp.eye(self.clients)))

    @property
    def edges(self) -> np.ndarray:
        """The links, each once, as pairs of clients."""
        return np.asarray(self.links.ends).T

    def start(self, x0: PyTree) -> PyTree:
        return x0

    @property
    def averages(self) -> bool:
        # On the complete graph a client hears everyone, as from a server.
        return self.complete and self.participation == 1

    @property
    def apart(self) -> tuple[int, ...]:
        return (self.clients,)

    def largest(self, values: Array) -> Array:
        return values

    def summed(self, values: Array) -> Array:
        return jnp.broadcast_to(jnp.sum(values), values.shape) if self.averages else values

    def heard(self, values: Array) -> Array:
        return Exchange(self.links, None, 1.0).heard(values)

    def inside(self) -> AbstractSet:
        return _Neighbours(self)

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return Exchange(self.links, key, self.participation)

    def message_size(self, y: PyTree) -> int:
        # Each client sends to every neighbour; in the mean over clients and working links.
        sent = self.participation * 2 * self.links.count / self.clients
        return round(sent * bytes_of_one_client(y))

    def link_size(self, y: PyTree) -> int:
        return round(2 * self.participation * bytes_of_one_client(y))

    @property
    def messages(self) -> int:
        return round(2 * self.participation * self.links.count)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        Consensus().check(y, name=name)
        found = jax.tree.leaves(y)[0].shape[0]
        if found != self.clients:
            raise ValueError(
                f"{name} is Gossip between {self.clients} clients, but the point has {found}: "
                f"start from aipod.federated.replicate(point, {self.clients})."
            )


class _Neighbours(AbstractAgreement):
    """`Gossip` as a solver sees it: what would need all clients at once raises `ValueError`."""

    base: Gossip

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        raise ValueError(
            "this method needs an average over all clients, which gossip does not have: use "
            "aipod.E3AiPOD, which is made for it, or aipod.Consensus in place of aipod.Gossip."
        )

    def tangent(self, v: PyTree) -> PyTree:
        return self.project(v)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.project(y)

    @property
    def averages(self) -> bool:
        return self.base.averages

    @property
    def apart(self) -> tuple[int, ...]:
        return self.base.apart

    def largest(self, values: Array) -> Array:
        return self.base.largest(values)

    def summed(self, values: Array) -> Array:
        return self.base.summed(values)

    def heard(self, values: Array) -> Array:
        return self.base.heard(values)

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return self.base.for_round(key)


def _weighted(
    graph: Any,
    clients: int | None,
    weights: Any,
    key: PRNGKeyArray | None,
    probability: float | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The links, their weights in W, and the number of clients."""
    if clients is not None and (type(clients) is not int or clients < 1):
        raise ValueError(f"clients must be a whole number, at least 1, got {clients!r}.")
    if not isinstance(graph, str) and (key is not None or probability is not None):
        raise ValueError("key and probability are for graph 'erdos-renyi': leave them out.")
    edges = None
    if isinstance(graph, str):
        edges, clients = named_edges(graph, clients, key, probability)
    elif graph is not None:
        edges, clients = given_edges(graph, clients)
    if weights is not None:
        linked, shares, clients = given_weights(weights, clients)
        _require_links(edges, linked)
        return linked, shares, clients
    if edges is None or clients is None:
        raise ValueError("Gossip needs a graph: a name such as 'ring', links or a matrix.")
    return edges, metropolis(edges, clients), clients


def _require_links(edges: np.ndarray | None, weighted: np.ndarray) -> None:
    """Raises `ValueError` when weights stand where a graph has no link, or are missing there."""
    if edges is None:
        return
    wanted, found = ({tuple(pair) for pair in pairs.tolist()} for pairs in (edges, weighted))
    if other := wanted ^ found:
        first, second = min(other)
        what = "no link there" if (first, second) in found else "a link there"
        raise ValueError(
            f"weights[{first}, {second}] does not fit the graph, which has {what}: leave graph "
            "out, the weights tell the links."
        )


def as_gossip(graph: Any, clients: int, participation: float) -> Gossip:
    """A graph of so many clients as a set; a set as it is."""
    if isinstance(graph, Gossip):
        if participation != 1:
            raise ValueError(
                "participation is then that of the links: give it to aipod.Gossip, or give the "
                "graph itself as graph=."
            )
        return graph
    return Gossip(graph, clients, participation=participation)
