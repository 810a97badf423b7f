"""Clients that remember their last direction of x: who takes part adds no noise in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.slots.upper import _every
from tests.federated.test_participation import CLIENTS, N, quadratic_clients

STEPS = {"upper_lr": 0.1, "lower_lr": 0.3, "adjoint_lr": 0.3}


def solved(problem, steps=3000, **options):
    start = federated.replicate(jnp.zeros(N), CLIENTS)
    solver = aipod.E3AiPOD(**STEPS | options)
    return aipod.solve(problem, solver, start, start, steps, key=jax.random.key(1))


def test_with_a_memory_absent_clients_leave_the_fixed_points_exact():
    problem, solution = quadratic_clients(0.6)
    found = solved(problem)
    np.testing.assert_allclose(found.x[0], solution, atol=1e-9)
    without = solved(problem, memory=False)
    assert np.linalg.norm(without.x[0] - solution) > 1e-3
    # And nothing more is sent.
    assert found.ledger.bytes_up == without.ledger.bytes_up


def weighted(participation, upper_set=None):
    """Clients of unlike weight whose f pulls x to points of their own; y does not matter."""
    rng = np.random.default_rng(2)
    t = rng.normal(size=(CLIENTS, 1, N))
    problem = federated.federate(
        lambda x, y, batch: 0.5 * jnp.sum((x - batch[0]) ** 2) + 0 * jnp.sum(y),
        lambda x, y, batch: 0.5 * jnp.sum(y**2) + 0 * jnp.sum(batch[0]),
        t,
        t,
        batch_size=None,
        participation=participation,
        weights=np.arange(1.0, CLIENTS + 1),
        upper_set=upper_set,
    )
    shares = np.arange(1, CLIENTS + 1) / np.arange(1, CLIENTS + 1).mean()
    return problem, shares, np.mean(shares[:, None] * t[:, 0], axis=0)


def test_the_average_is_that_of_what_all_clients_remember():
    problem, shares, solution = weighted(0.6)
    for steps in (1, 2, 7):
        kept = solved(problem, steps).state.upper
        mean = np.mean(shares[:, None] * kept.known, axis=0)
        np.testing.assert_allclose(kept.average[0], mean, atol=1e-12)
        np.testing.assert_allclose(kept.part, 0.6)
    np.testing.assert_allclose(solved(problem).x[0], solution, atol=1e-9)


def test_in_an_affine_set_too_and_not_in_one_with_bounds():
    plane = aipod.Affine(jnp.ones((1, N)), jnp.zeros(1))
    problem, _, solution = weighted(0.6, plane)
    found = solved(problem)
    np.testing.assert_allclose(found.x[0], solution - solution.mean(), atol=1e-9)
    bounded, _, _ = weighted(0.6, aipod.Box(-0.1, 0.1))
    assert solved(bounded, 2).state.upper.average is None


def test_it_is_kept_where_it_is_small_unless_said_otherwise(monkeypatch):
    def average(problem, **options):
        return solved(problem, 1, **options).state.upper.average

    problem, everyone = quadratic_clients(0.6)[0], quadratic_clients(1.0)[0]
    assert average(problem) is not None
    assert average(problem, memory=False) is None
    assert average(everyone, memory=True) is None
    # AiPOD is the paper's.
    start = federated.replicate(jnp.zeros(N), CLIENTS)
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.3)
    run = aipod.solve(problem, solver, start, start, 1, key=jax.random.key(1))
    assert run.state.upper.average is None
    monkeypatch.setattr(_every, "_MEMORY", CLIENTS * N * 8 - 1)
    jax.clear_caches()
    assert average(problem) is None
    assert average(problem, memory=True) is not None


def test_nothing_else_is_taken_for_a_memory():
    with pytest.raises(ValueError, match="memory must be True, False or None, got 'yes'"):
        aipod.E3AiPOD(memory="yes")


def test_with_paced_adam_it_settles_and_without_a_memory_it_does_not():
    problem, solution = quadratic_clients(0.6)

    def error(**options):
        start = federated.replicate(jnp.ones(N), CLIENTS)
        solver = aipod.E3AiPOD(**options)
        run = aipod.solve(problem, solver, start, start, 2000, key=jax.random.key(3))
        return np.linalg.norm(run.x[0] - solution)

    assert error() < 1e-4 < 1e-2 < error(memory=False)
