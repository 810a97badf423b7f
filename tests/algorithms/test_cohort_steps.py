"""Local steps of a cohort: shorter while its clients pull in different directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.stepsize import calmed, spread_of
from tests.algorithms.test_e3 import federation

KEY = jax.random.key(3)
UNTEMPERED = aipod.Curvature(tempered=False)


def shares(problem, start, steps, solver=None):
    """The share after each outer step, with x held."""
    solver = solver or aipod.E3AiPOD(upper_lr=1e-12, lower_steps=10, adjoint_steps=5)

    @jax.jit
    def run(state):
        def step(state, key):
            state = solver.step(problem, state, key=key)
            share = state.lower.share
            return state, (jnp.ones(()) if share is None else share, state.y)

        return jax.lax.scan(step, state, jax.random.split(KEY, steps))[1]

    share, y = run(solver.init(problem, *start))
    return np.asarray(share), np.asarray(y)


def test_short_steps_of_unlike_clients_find_y_sooner():
    """1e-11 after 300 rounds with a fifth of the clients, where long steps are at 3e-4."""
    found, everyone = federation(clients=20, participation=0.2), federation(clients=20).problem
    start = found.start()
    exact = np.asarray(aipod.exact_lower(everyone, *start))
    calm, short = shares(found.problem, start, 300)
    assert calm[20:].max() < 0.5
    options = {"upper_lr": 1e-12, "lower_steps": 10, "adjoint_steps": 5}
    _, long = shares(found.problem, start, 300, aipod.E3AiPOD(lower_lr=UNTEMPERED, **options))
    gaps = [np.max(np.abs(y[-1] - exact)) for y in (short, long)]
    assert gaps[0] < 1e-9
    assert gaps[1] > 1e-5
    assert np.all(shares(everyone, start, 20)[0] == 1.0)


def test_clients_that_are_alike_keep_their_steps():
    def lower(x, y, batch):
        return 0.5 * jnp.sum((y - x - jnp.mean(batch)) ** 2)

    data = jnp.ones((10, 4))
    problem = federated.federate(lower, lower, data, data, batch_size=None, participation=0.3)
    start = [federated.replicate(jnp.zeros(3), 10)] * 2
    assert np.all(shares(problem, start, 20)[0] == 1.0)


def test_a_number_as_step_size_is_taken_as_it_is():
    found = federation(clients=6, participation=0.5)
    state = aipod.E3AiPOD(upper_lr=0.1, lower_lr=0.05).init(found.problem, *found.start())
    assert state.lower.share is None
    assert state.lower.spread is None


@pytest.mark.parametrize("clients", [2, 5])
def test_the_spread_is_that_of_the_mean_of_other_cohorts(clients):
    """N is the variance of the mean of c independent moves: by NumPy, over many cohorts."""
    rng = np.random.default_rng(0)
    moves = rng.normal(size=(4000, clients, 3)) + np.array([2.0, 0.0, 0.0])
    cohort = aipod.Consensus(participation=0.5).cohort(jnp.arange(clients), 2 * clients, clients)

    def chance(way):
        total, count = spread_of(cohort, jnp.zeros((clients, 3)), way)
        return (total / count - jnp.sum(jnp.mean(way, axis=0) ** 2)) / (count - 1)

    found = np.asarray(jax.vmap(chance)(jnp.asarray(moves)))
    # Its own standard deviation over 4,000 cohorts of 2 is about 1 %.
    np.testing.assert_allclose(found.mean(), np.var(moves.mean(axis=1), axis=0).sum(), rtol=0.05)


@pytest.mark.parametrize(
    ("total", "grows"), [(2 * 4.0, True), (2 * 4.0 * 1.29, True), (2 * 4.0 * 1.31, False)]
)
def test_the_share_rests_where_chance_is_a_part_of_the_move(total, grows):
    share = calmed(jnp.asarray(0.6), jnp.asarray([total, 2.0]), jnp.asarray([2.0]))
    assert (float(share) > 0.6) == grows


def test_the_share_stays_between_a_fifth_and_one():
    still = jnp.zeros(2)
    assert float(calmed(jnp.asarray(1.0), jnp.asarray([0.0, 5.0]), still)) == 1.0
    apart = calmed(jnp.asarray(0.21), jnp.asarray([1e9, 5.0]), jnp.ones(2))
    assert float(apart) == pytest.approx(0.2)


def test_the_pace_of_x_does_not_compare_f_of_different_cohorts():
    solver, levels = aipod.E3AiPOD(lower_steps=5), []
    for share in (0.2, 1.0):
        found = federation(clients=10, participation=share)
        state = solver.init(found.problem, *found.start())
        for key in jax.random.split(KEY, 3):
            state = solver.step(found.problem, state, key=key)
        (pace,) = [s for s in jax.tree.leaves(state.upper, is_leaf=_is_pace) if _is_pace(s)]
        levels.append(np.asarray(pace.evidence.level))
    assert np.all(levels[0] == 0)
    assert np.all(levels[1][:2] != 0)


def _is_pace(node):
    return hasattr(node, "evidence")
