"""Without a server: exact where it is corrected, the server's run on the complete graph."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated

CLIENTS, SIZE = 16, 3
KEY = jax.random.key(0)
# Steps of a given length, so that one program serves all graphs of one form.
PLAIN = dict(lower_lr=0.15, adjoint_lr=0.15, lower_steps=4, adjoint_steps=2, damping=0.0)
E3 = aipod.E3AiPOD(upper_lr=0.15, **PLAIN)


def upper(x, y, batch):
    (bend, keep, wish), move = batch, y - batch[2][0]
    del wish
    return 0.5 * move @ bend[0] @ move + 0.5 * x @ keep[0] @ x


def lower(x, y, batch):
    return 0.5 * y @ batch[0][0] @ y - y @ (batch[1][0] @ x + batch[2][0])


@functools.cache
def quadratics(clients=CLIENTS, seed=0):
    """Unlike clients: their data at both levels, for clients of one example."""
    rng = np.random.default_rng(seed)

    def bent(least):
        root = rng.normal(size=(clients, SIZE, SIZE)) / np.sqrt(SIZE)
        return root @ root.transpose(0, 2, 1) + least * np.eye(SIZE)

    below = (
        bent(0.5),
        0.3 * rng.normal(size=(clients, SIZE, SIZE)),
        2 * rng.normal(size=(clients, SIZE)),
    )
    above = bent(0.5), bent(0.3), 2 * rng.normal(size=(clients, SIZE))
    return tuple(tuple(jnp.asarray(one)[:, None] for one in part) for part in (above, below))


def solution(clients=CLIENTS, weights=None, seed=0):
    """x* and y*, by linear algebra."""
    shares = np.full(clients, 1 / clients) if weights is None else weights / np.sum(weights)
    (bend, keep, wish), (G, B, c) = (
        [np.asarray(a)[:, 0] for a in part] for part in quadratics(clients, seed)
    )
    mean = lambda a: np.tensordot(shares, a, 1)  # noqa: E731
    A, start = np.linalg.solve(mean(G), mean(B)), np.linalg.solve(mean(G), mean(c))
    right = mean(np.einsum("mij,mj->mi", bend, wish)) - mean(bend) @ start
    x = np.linalg.solve(A.T @ mean(bend) @ A + mean(keep), A.T @ right)
    return x, A @ x + start


def problem(graph, clients=CLIENTS, **more):
    above, below = quadratics(clients)
    return federated.federate(upper, lower, above, below, batch_size=None, graph=graph, **more)


def zeros(clients=CLIENTS):
    return jnp.zeros((clients, SIZE))


def error(point, wanted):
    return float(np.max(np.abs(np.asarray(point) - wanted)))


def solved(graph, solver, steps, clients=CLIENTS, *, weights=None, every=100, **more):
    """The run, with the distance from the solution over time."""
    x, y = (jnp.asarray(part)[None] for part in solution(clients, weights))

    def off(a, b):
        return {"off": jnp.maximum(jnp.max(jnp.abs(a - x)), jnp.max(jnp.abs(b - y)))}

    given = more if weights is None else {**more, "weights": weights}
    made = problem(graph, clients, **given)
    start = jax.random.normal(KEY, (clients, SIZE))
    # Every client starts somewhere else.
    return aipod.solve(made, solver, start, -start, steps, key=KEY, record=off, every=every)


GRAPHS = {
    "ring": aipod.Gossip("ring", CLIENTS),
    "exponential": aipod.Gossip("exponential", CLIENTS),
    "random": aipod.Gossip("erdos-renyi", CLIENTS, key=KEY),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_unlike_clients_find_the_exact_solution_at_a_linear_rate(graph):
    off = solved(GRAPHS[graph], E3, 800, every=25).history["off"]
    assert off[-1] < 1e-10
    # A straight line on a logarithmic scale, until rounding.
    falling = np.log(off[off > 1e-11])
    assert len(falling) > 4
    slopes = np.diff(falling)
    half = len(slopes) // 2
    assert slopes.max() < 0
    assert slopes[half:].mean() < 0.5 * slopes[:half].mean()


def test_without_the_correction_of_x_it_stalls():
    every = aipod.EveryStep(lr=0.15, corrected=False)
    found = solved(GRAPHS["ring"], eqx.tree_at(lambda s: s.upper, E3, every), 800)
    off = found.history["off"]
    assert off[-1] > 1e-3
    assert off[-1] == pytest.approx(off[-3], rel=1e-3)


OPTIMISERS = {
    "sgd": E3,
    "adam": aipod.E3AiPOD(upper_optimizer=optax.adam(0.01), **PLAIN),
    # Norms over a leaf are those of one client.
    "clipped": aipod.E3AiPOD(
        upper_optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), **PLAIN
    ),
    "defaults": aipod.E3AiPOD(),
    "e2-aipod": aipod.E2AiPOD(upper_lr=0.05),
    "e-aipod": aipod.EAiPOD(upper_lr=0.05, extrapolation=1.5),
    "aipod": aipod.AiPOD(),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_on_the_complete_graph_every_step_is_that_of_a_server(name):
    solver, start = OPTIMISERS[name], jnp.ones((CLIENTS, SIZE))
    both = [problem(None), problem("complete")]
    states = [solver.init(one, start, 0 * start) for one in both]
    for _ in range(12):
        states = [solver.step(p, s, key=KEY) for p, s in zip(both, states, strict=True)]
        assert error(states[0].x, states[1].x) < 1e-12
        assert error(states[0].y, states[1].y) < 1e-12
    assert error(states[0].x, start) > 1e-4


def test_optimisers_get_a_tracked_gradient():
    found = solved(GRAPHS["exponential"], OPTIMISERS["adam"], 1500, every=1500)
    assert found.history["off"][-1] < 1e-10
    assert np.abs(found.state.upper.correction.sum(0)).max() < 1e-12


def test_the_defaults_find_it_too_and_say_so():
    found = solved(GRAPHS["exponential"], aipod.E3AiPOD(), 600, every=600)
    assert found.history["off"][-1] < 1e-6
    assert found.convergence.stationarity < 1e-2


WITHIN = {"box": aipod.Box(-0.2, 0.3), "simplex": aipod.Simplex()}


@pytest.mark.parametrize(("graph", "within"), [("ring", "box"), ("exponential", "simplex")])
def test_a_set_of_x_is_met_exactly_by_every_client(graph, within):
    """The point is that of a run with a server."""
    bounds, start = WITHIN[within], jax.random.normal(KEY, (CLIENTS, SIZE))
    server = aipod.solve(
        problem(None, upper_set=bounds), E3, zeros(), zeros(), 800, key=KEY, every=800
    )
    made = problem(GRAPHS[graph], upper_set=bounds)
    found = aipod.solve(made, E3, start, -start, 900, key=KEY, every=900)
    assert error(found.x, np.asarray(server.x)[0]) < 1e-9
    assert error(found.y, np.asarray(server.y)[0]) < 1e-9
    assert float(jnp.max(jnp.abs(jnp.sum(found.state.upper.correction, 0)))) < 1e-11
    # Bounds are active: without them the solution is another.
    assert error(solution()[0], np.asarray(server.x)[0]) > 1e-2
    assert float(aipod.stationarity(made, found.feasible()[0], found.y)) < 1e-16


def test_a_set_of_x_without_a_server_takes_plain_steps():
    made = problem("ring", upper_set=aipod.Box(-0.2, 0.3))
    solver = aipod.E3AiPOD()
    state = solver.init(made, zeros(), zeros())
    with pytest.raises(ValueError, match=r"plain steps on x.*E3AiPOD\(upper_lr"):
        solver.step(made, state, key=KEY)


def test_corrections_sum_to_zero_after_ten_thousand_steps_with_failing_links():
    graph = aipod.Gossip("ring", CLIENTS, participation=0.7)
    # The defaults of the step sizes are each client's own, and change all the time.
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=4)
    found = solved(graph, solver, 10_000, every=10_000)
    state = found.state
    for correction in (state.lower.correction, state.adjoint.correction, state.upper.correction):
        assert float(jnp.max(jnp.abs(correction))) > 0.1
        assert float(jnp.max(jnp.abs(jnp.sum(correction, 0)))) < 1e-11
    assert found.history["off"][-1] < 1e-10


def test_weighted_clients_solve_the_weighted_problem():
    weights = np.linspace(1, 3, CLIENTS)
    found = solved(GRAPHS["exponential"], E3, 800, weights=weights)
    assert found.history["off"][-1] < 1e-10
    assert error(solution()[0], solution(weights=weights)[0]) > 1e-2


@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients(clients):
    assert solved("ring", E3, 600, clients, every=600).history["off"][-1] < 1e-10


def test_no_client_knows_more_than_its_neighbours_tell():
    """What a client has after k steps does not depend on clients more than k links away."""
    path = aipod.Gossip([(i, i + 1) for i in range(7)])
    above, below = quadratics(8)
    changed = jax.tree.map(lambda leaf: leaf.at[7].multiply(3.0), (above, below))
    solver, states = aipod.E3AiPOD(), []
    for data in ((above, below), changed):
        made = federated.federate(upper, lower, *data, batch_size=None, graph=path)
        state = solver.init(made, jnp.ones((8, SIZE)), zeros(8))
        for _ in range(3):
            state = solver.step(made, state, key=KEY)
        states.append(state)
    first, second = states
    # Three exchanges of messages, and one of the first curvature.
    for name in ("x", "y", "lower", "adjoint", "upper"):
        for a, b in zip(*(jax.tree.leaves(getattr(s, name)) for s in states), strict=True):
            np.testing.assert_array_equal(a[:3], b[:3])
    assert np.all(np.abs(first.y[4:] - second.y[4:]).max(1) > 0)


def test_maxima_of_the_curvature_spread():
    path = aipod.Gossip([(i, i + 1) for i in range(7)])
    above, below = quadratics(8)
    steep = (below[0].at[0].multiply(50.0), *below[1:])
    made = federated.federate(upper, lower, above, steep, batch_size=None, graph=path)
    solver = aipod.E3AiPOD(upper_lr=0.01)
    state = solver.init(made, zeros(8), zeros(8))
    for _ in range(8):
        state = solver.step(made, state, key=KEY)
    estimate = np.asarray(state.curvature.estimate)
    assert np.all(np.diff(estimate) <= 0)
    assert estimate[-1] > 0.6 * estimate[0]


def test_what_needs_all_clients_at_once_is_refused():
    made = problem("ring")
    solver = aipod.Alternating(E3.lower, aipod.ConjugateGradient(), E3.upper)
    state = solver.init(made, zeros(), zeros())
    with pytest.raises(ValueError, match=r"use aipod\.E3AiPOD"):
        solver.step(made, state, key=KEY)


def test_compression_needs_a_server():
    with pytest.raises(ValueError, match="federations with a server"):
        aipod.E3AiPOD(compression="bfloat16").init(problem("ring"), zeros(), zeros())


def test_an_optimiser_after_several_steps_is_refused():
    solver = aipod.EAiPOD(upper_lr=0.1, upper_steps=2, upper_optimizer=optax.sgd(1.0))
    with pytest.raises(ValueError, match="in gossip upper_optimizer"):
        solver.init(problem("ring"), zeros(), zeros())


def test_a_start_may_be_given_once_for_all_clients():
    solver, made = aipod.E3AiPOD(), problem("ring")
    state = solver.init(made, jnp.ones((1, SIZE)), zeros(1))
    assert state.x.shape == state.y.shape == (CLIENTS, SIZE)


def test_single_precision_stays_single():
    above, below = jax.tree.map(lambda a: a.astype(jnp.float32), quadratics())
    made = federated.federate(upper, lower, above, below, batch_size=None, graph="ring")
    solver, start = aipod.E3AiPOD(), jnp.ones((CLIENTS, SIZE), jnp.float32)
    state = solver.step(made, solver.init(made, start, start), key=KEY)
    assert state.x.dtype == state.y.dtype == state.upper.correction[0].dtype == jnp.float32


def test_the_ledger_counts_rounds_messages_and_bytes_of_links():
    made = problem(aipod.Gossip("ring", CLIENTS, participation=0.5))
    ledger = aipod.solve(made, E3, zeros(), zeros(), 10, key=KEY).ledger
    assert ledger.rounds == 10
    assert ledger.messages == 10 * CLIENTS
    # x, y and u in both directions, half of the time; and of a client to two neighbours.
    assert ledger.bytes_per_link == ledger.bytes_up == 10 * 3 * SIZE * 8
    history = aipod.solve(made, OPTIMISERS["adam"], zeros(), zeros(), 2, key=KEY).history
    # An optimiser sends x and a gradient.
    assert history["bytes_per_link"][-1] == 2 * 4 * SIZE * 8
    served = aipod.solve(problem(None), E3, zeros(), zeros(), 2, key=KEY)
    assert served.ledger.messages == 0
    assert "messages" not in served.history


def test_check_shows_the_gap_and_warns_of_a_poor_one():
    report = aipod.check(problem("ring"), zeros(), zeros(), key=KEY)
    assert report.ok
    found = {finding.name: finding for finding in report.findings}
    assert "spectral gap 0.0507" in found["graph"].value
    assert "these are inexact" in found["methods"].value
    notes = aipod.diagnose._findings.Notes()
    aipod.diagnose._parts.check_graph(notes, problem("ring", 64))
    assert notes.findings[0].status == "warning"
    assert "exponential" in notes.findings[0].remedy


def test_flower_has_a_server():
    flower = pytest.importorskip("aipod.flower")
    with pytest.raises(ValueError, match="Flower has a server"):
        flower.client_of(problem("ring"), zeros(), zeros(), index=0)


def test_gossip_is_for_both_levels():
    with pytest.raises(ValueError, match="at both levels or at none"):
        dataclasses.replace(problem("ring"), upper_set=aipod.Consensus())


def test_a_run_that_is_resumed_is_the_same(tmp_path):
    made = problem(aipod.Gossip("ring", CLIENTS, participation=0.8))
    arguments = (made, E3, zeros(), zeros())
    whole = aipod.solve(*arguments, 12, key=KEY)
    aipod.solve(*arguments, 5, key=KEY, checkpoint=tmp_path / "kept")
    rest = aipod.solve(*arguments, 12, key=KEY, checkpoint=tmp_path / "kept", resume=True)
    np.testing.assert_array_equal(rest.x, whole.x)
    assert rest.ledger == whole.ledger
