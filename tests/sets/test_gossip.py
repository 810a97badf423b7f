"""Graphs between clients: how they are given and refused, and what one exchange does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import aipod
from aipod import federated
from aipod.sets._exchange import Exchange, links_of
from aipod.sets._graphs import given_edges, metropolis

KEY = jax.random.key(0)
PATH = [(0, 1), (1, 2), (2, 3)]
ADJACENT = np.zeros((4, 4), int)
for one, other in PATH:
    ADJACENT[one, other] = ADJACENT[other, one] = 1


def lazy(graph):
    """V from the adjacency matrix, by NumPy."""
    degree = np.bincount(graph.edges.ravel(), minlength=graph.clients)
    W = np.zeros((graph.clients, graph.clients))
    for i, j in graph.edges:
        W[i, j] = W[j, i] = 1 / (1 + max(degree[i], degree[j]))
    W += np.diag(1 - W.sum(1))
    values = np.linalg.eigvalsh(W)
    return np.eye(len(W)) - (np.eye(len(W)) - W) / max(1.0, 1 - values[0]), values


@pytest.mark.parametrize(
    "graph",
    [
        *(PATH, [*PATH, (1, 0)], tuple(PATH), set(PATH), np.array(PATH)),
        *(ADJACENT, jnp.asarray(ADJACENT), ADJACENT.tolist(), ADJACENT.astype(bool)),
        *(scipy.sparse.csr_array(ADJACENT), scipy.sparse.coo_matrix(ADJACENT)),
    ],
    ids=lambda graph: type(graph).__name__,
)
def test_every_way_to_give_a_graph_gives_the_same_links(graph):
    np.testing.assert_array_equal(aipod.Gossip(graph).edges, PATH)


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("name", ["ring", "grid", "exponential", "complete", "erdos-renyi"])
def test_mixing_is_doubly_stochastic_without_negative_eigenvalues(name, clients):
    key = KEY if name == "erdos-renyi" else None
    graph = aipod.Gossip(name, clients, key=key)
    mixing, (wanted, values) = graph.mixing(), lazy(graph)
    np.testing.assert_allclose(mixing, wanted, atol=1e-14)
    np.testing.assert_allclose(mixing.sum(1), 1, atol=1e-14)
    assert np.linalg.eigvalsh(mixing)[0] > -1e-12
    gap = 1 - values[-2] if clients > 1 else 1.0
    assert graph.gap == pytest.approx(gap, abs=1e-12)
    if name == "complete":
        np.testing.assert_allclose(mixing, 1 / clients, atol=1e-14)


def test_named_graphs_have_their_links():
    assert aipod.Gossip("ring", 16).gap == pytest.approx(2 / 3 * (1 - np.cos(np.pi / 8)))
    assert len(aipod.Gossip("ring", 2).edges) == 1
    assert len(aipod.Gossip("grid", 12).edges) == 3 * 3 + 2 * 4
    linked = {int(j) for i, j in aipod.Gossip("exponential", 16).edges if i == 0}
    assert linked == {1, 2, 4, 8, 12, 14, 15}


def test_the_sparse_the_shifted_and_the_dense_exchange_are_one():
    graph = aipod.Gossip("exponential", 300)
    assert graph.links.shifts is not None
    rng = np.random.default_rng(0)
    named = rng.permutation(300)
    edges, _ = given_edges(np.sort(named[graph.edges], axis=1), 300)
    links = links_of(edges, metropolis(edges, 300), 300)
    assert links.shifts is None
    assert links.neighbours is not None
    y, scale = rng.normal(size=(300, 3)), rng.uniform(1, 2, 300)
    W = np.zeros((300, 300))
    W[edges[:, 0], edges[:, 1]] = W[edges[:, 1], edges[:, 0]] = metropolis(edges, 300)
    W += np.diag(1 - W.sum(1))
    exchange = Exchange(links, None, 1.0)
    np.testing.assert_allclose(exchange.project(jnp.asarray(y)), W @ y, atol=1e-13)
    pair = (W - np.diag(np.diag(W))) / np.maximum(scale[:, None], scale[None])
    pulled = pair @ y - pair.sum(1)[:, None] * y
    new, r = exchange.settle(jnp.asarray(y), jnp.zeros(y.shape), jnp.asarray(scale))
    np.testing.assert_allclose(r, pulled, atol=1e-13)
    np.testing.assert_allclose(new, y + scale[:, None] * pulled, atol=1e-13)


@pytest.mark.parametrize("graph", [("ring", 6), ("complete", 20)], ids=["shifts", "dense"])
def test_failing_links_keep_sums_and_what_agrees(graph):
    graph = aipod.Gossip(*graph, participation=0.5)
    rng = np.random.default_rng(0)
    shape = (graph.clients, 2, 2)
    y, r = (jnp.asarray(rng.normal(size=shape)) for _ in range(2))
    scale = jnp.asarray(rng.uniform(0.1, 3.0, graph.clients))
    moved = 0
    for index in range(8):
        working = graph.for_round(jax.random.key(index))
        mixed = working.project(y)
        np.testing.assert_allclose(mixed.sum(0), y.sum(0), atol=1e-12)
        np.testing.assert_allclose(working.project(jnp.ones(shape)), 1, atol=1e-13)
        moved += not np.allclose(mixed, np.tensordot(graph.mixing(), y, 1))
        for one in (scale, jnp.asarray(0.3)):
            np.testing.assert_allclose(working.settle(y, r, one)[1].sum(0), r.sum(0), atol=1e-11)
        tracked, s = working.track(y, r)
        np.testing.assert_allclose(tracked, y - s, atol=1e-12)
        np.testing.assert_allclose(s.sum(0), r.sum(0), atol=1e-12)
    assert moved


def test_maxima_go_from_neighbour_to_neighbour():
    graph = aipod.Gossip(PATH)
    values = jnp.asarray([4.0, 1.0, 2.0, 0.0])
    np.testing.assert_array_equal(graph.heard(values), [4, 4, 2, 2])
    silent = Exchange(graph.links, KEY, 1e-9)
    np.testing.assert_array_equal(silent.heard(values), values)


def test_points_keep_their_types():
    y = {"a": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.arange(3, dtype=jnp.float32)}
    found = aipod.Gossip("ring", 3).for_round(KEY).project(y)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, y)


OFF = np.eye(3) * 0.5 + np.roll(np.eye(3), 1, 0) * 0.5
REFUSED = {
    "not connected": dict(graph=[(0, 1), (2, 3)]),
    "comes to 2. Add": dict(graph=[(0, 1)], clients=3),
    "to itself: leave self-loops out": dict(graph=[(0, 1), (1, 1)]),
    "links client 0 to itself": dict(graph=ADJACENT + np.eye(4, dtype=int)),
    "none back": dict(graph=np.triu(ADJACENT)),
    "holds 0 and 1; give averaging weights": dict(graph=0.5 * ADJACENT),
    "numbered 0, 1, 2": dict(graph=[(0, -1)]),
    "names client 5": dict(graph=[(0, 5)], clients=3),
    "needs to know how many clients": dict(graph="ring"),
    "must be one of ring, grid": dict(graph="star", clients=3),
    "needs key=": dict(graph="erdos-renyi", clients=3),
    "larger probability": dict(graph="erdos-renyi", clients=9, key=KEY, probability=1e-9),
    "needs a graph": {},
    "square matrix, got shape": dict(graph=np.ones((3, 4))),
    "matrix of 4 clients": dict(graph=ADJACENT, clients=5),
    "must be a name": dict(graph=3),
    "at least 1, got 0": dict(graph="ring", clients=0),
    "weights must be symmetric": dict(weights=OFF),
    r"doubly stochastic, but row 0 sums to 1.5": dict(
        weights=np.eye(3) + OFF / 2 + OFF.T / 2 - np.eye(3) / 2
    ),
    r"weights\[0, 1\] is -0.5": dict(weights=[[1.5, -0.5], [-0.5, 1.5]]),
    "NaN": dict(weights=[[np.nan, 0], [0, 1.0]]),
    "share of the links": dict(graph="ring", clients=3, participation=0.0),
    "does not fit the graph": dict(graph=[(0, 1), (1, 2)], weights=np.full((3, 3), 1 / 3)),
    "for graph 'erdos-renyi'": dict(graph=PATH, key=KEY),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_graph_is_refused_with_the_remedy(words):
    with pytest.raises(ValueError, match=words):
        aipod.Gossip(**REFUSED[words])


def test_own_weights_may_be_rounded_to_single_precision():
    third = np.full((3, 3), 1 / 3, np.float32)
    graph = aipod.Gossip(weights=third)
    np.testing.assert_allclose(graph.mixing(), 1 / 3, atol=1e-7)
    np.testing.assert_allclose(graph.mixing().sum(1), 1, atol=1e-15)
    assert aipod.Gossip(weights=scipy.sparse.csr_array(third)).clients == 3


def test_a_point_must_have_a_row_for_each_client():
    with pytest.raises(ValueError, match="between 4 clients, but the point has 3"):
        aipod.Gossip(PATH).check(jnp.zeros((3, 2)))


def federation(graph, **more):
    data = jnp.ones((4, 2, 3))
    loss = lambda x, y, batch: jnp.sum((y - x) ** 2) + jnp.sum(batch)  # noqa: E731
    return federated.federate(loss, loss, data, data, batch_size=None, graph=graph, **more)


def test_federate_takes_a_graph():
    assert federation("ring").lower_set.clients == 4
    assert federation("ring", participation=0.5).upper_set.participation == 0.5
    made = aipod.Gossip(PATH, participation=0.25)
    assert federation(made).lower_set is made


@pytest.mark.parametrize(
    ("graph", "more", "words"),
    [
        (PATH[:2], {}, "not connected"),
        (aipod.Gossip("ring", 5), {}, "graph has 5 clients"),
        ("ring", {"upper_set": aipod.Consensus()}, "upper_set must be a set for one client's x"),
        ("ring", {"chosen": "step"}, "leave chosen out"),
        (aipod.Gossip(PATH), {"participation": 0.5}, "give it to aipod.Gossip"),
    ],
)
def test_federate_refuses(graph, more, words):
    with pytest.raises(ValueError, match=words):
        federation(graph, **more)


def test_in_a_round_each_client_projects_what_it_has_heard():
    ring, points = aipod.Gossip("ring", 4), np.arange(8.0).reshape(4, 2)
    both = aipod.sets.AgreedWithin(ring, aipod.Box(0.0, 3.0))
    heard = ring.mixing() @ points
    np.testing.assert_allclose(both.for_round(KEY).project(points), np.clip(heard, 0, 3))
    new, pulled = both.for_round(KEY).settle(points, 0 * points, np.asarray(2.0))
    np.testing.assert_allclose(new, np.clip(heard, 0, 3))
    # The correction is that of the point before its projection, so that all of them sum to zero.
    np.testing.assert_allclose(pulled, (heard - points) / 2)
    # Reference values are those of the mean.
    np.testing.assert_allclose(both.project(points), np.full((4, 2), 3.0))
