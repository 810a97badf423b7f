"""Adjoints that go on from the step before, which AiPOD, E-AiPOD and E2-AiPOD have by default."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated

KEY = jax.random.key(0)
BENDS = jnp.array([1.0, 0.3, 0.01])


def upper(x, y, _):
    return 0.5 * jnp.sum((y - 1.0) ** 2) + 0.05 * jnp.sum(x**2)


def lower(x, y, _):
    return 0.5 * jnp.sum(BENDS * y**2) - jnp.sum(x * y)


PROBLEM = aipod.Bilevel(upper, lower)
# Factors with mean 1, drawn one at a time.
STEEP = aipod.Minibatches(jnp.array([4.0, 0.4, 0.4, 0.4, 0.4, 0.4]), 1)


def factor(batch):
    return 1.0 if batch is None else jnp.mean(batch)


SOLVERS = {"AiPOD": aipod.AiPOD, "E-AiPOD": aipod.EAiPOD, "E2-AiPOD": aipod.E2AiPOD}


@pytest.mark.parametrize("name", SOLVERS)
def test_the_bias_of_a_short_series_dies_out(name):
    """With condition number 100 ten terms are far too few; explicitly chosen, they stay that."""

    def after(**options):
        solver = SOLVERS[name](upper_lr=1e-9, lower_lr=1.0, adjoint_lr=1.0, **options)
        y = jnp.full(3, 0.9)
        return aipod.solve(PROBLEM, solver, BENDS * y, y, 100, key=KEY)

    warm, cold = after(), after(adjoint_steps=10)
    adjoint = warm.state.adjoint
    z = -adjoint.u if name == "E2-AiPOD" else adjoint.z
    np.testing.assert_allclose(z, -0.1 / BENDS, rtol=0.01)
    # x has moved by 1e-9 times the sum of 100 hypergradients -0.1 / b.
    moved = [(run.x - 0.9 * BENDS)[2] for run in (warm, cold)]
    assert moved[0] > 5 * moved[1] > 0


def test_costs_are_counted_as_they_are():
    solver = aipod.AiPOD(upper_lr=1e-3, lower_steps=2)
    ledger = aipod.solve(PROBLEM, solver, jnp.zeros(3), jnp.zeros(3), 4, key=KEY).ledger
    # Eight batches for the first curvature; one for curvature and one for w in each step.
    assert ledger.lower_samples == 7 + 4 * (2 + 9 + 2)
    assert ledger.upper_samples == 4 * (8 + 1)
    assert ledger.adjoint_projections == 4 * 10


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", ["AiPOD", "E2-AiPOD"])
def test_a_lower_level_that_bends_down_does_not_make_z_grow(name, noisy):
    def bent(x, y, batch):
        return factor(batch) * (lower(x, y, batch) - 0.2 * y[2] ** 2)

    solver = SOLVERS[name](upper_lr=1e-9, lower_lr=1e-9, adjoint_lr=0.5)
    problem = aipod.Bilevel(upper, bent, lower_samples=STEEP if noisy else None)
    found = aipod.solve(problem, solver, jnp.ones(3), jnp.zeros(3), 150, key=KEY)
    assert all(np.max(np.abs(leaf)) < 1e3 for leaf in jax.tree.leaves(found.state.adjoint))
    if name == "AiPOD":
        assert not found.convergence.convex


@pytest.mark.parametrize("name", SOLVERS)
def test_noise_does_not_make_the_mean_of_z_too_short(name):
    """A sixth of the batches is so steep that the residual is three times the right-hand side."""

    def noisy(x, y, batch):
        return factor(batch) * 0.5 * jnp.sum(BENDS * y**2) - jnp.sum(x * y)

    problem = aipod.Bilevel(upper, noisy, lower_samples=STEEP)
    solver = SOLVERS[name](upper_lr=1e-9, lower_lr=1e-9, adjoint_lr=0.2)
    start, y = 0.9 * BENDS, jnp.full(3, 0.9)

    def moved(steps):
        return aipod.solve(problem, solver, start, y, steps, key=KEY).x - start

    # x has moved by 1e-9 times the sum of the hypergradients, whose mean is -z.
    mean = (moved(4000) - moved(500)) / 3500e-9
    np.testing.assert_allclose(mean + 0.1 * start, 0.1 / BENDS, rtol=0.1)


def test_clients_agree_on_the_series():
    shift = jnp.arange(1.0, 4.0).reshape(3, 1, 1)

    def of_client(x, y, batch):
        return 0.5 * jnp.sum(BENDS * (y - batch[0, 0]) ** 2) - jnp.sum(x * y)

    problem = federated.federate(upper, of_client, shift, shift, batch_size=None)
    start = federated.replicate(jnp.zeros(3), 3)
    solver = aipod.EAiPOD(upper_lr=1e-3)
    found = aipod.solve(problem, solver, start, start, 5, key=KEY)
    z = found.state.adjoint.z
    np.testing.assert_array_equal(z, jnp.broadcast_to(z[:1], z.shape))
    owned = solver.adjoint.own(found.state.adjoint)
    assert owned.z is False
    assert owned.health.left is True
    assert dataclasses.replace(solver.adjoint, local=True).own(found.state.adjoint).z is True
    # Ten averages of the series in nine rounds, since the first two do not wait for each other.
    ledger = found.ledger
    assert ledger.adjoint_projections == 50
    assert ledger.rounds == 5 * 9 + ledger.lower_projections + ledger.upper_projections


def test_what_does_not_go_together():
    for options in ({"random": True}, {"steps": 1}):
        with pytest.raises(ValueError, match="leave warm out"):
            aipod.Neumann(warm=True, **options)
    assert not aipod.AiPOD(adjoint_random=True).adjoint.warm
    assert not aipod.ALSET().adjoint.warm
    assert aipod.AiPOD().adjoint.warm


@pytest.mark.parametrize("sure", [True, False])
def test_z_stays_where_the_curvature_has_outgrown_its_estimate(sure):
    """y has come to where the lower level bends ten times more than when it was looked at.

    A number for adjoint_lr is taken as it is: that it is too long must show.
    """
    problem = aipod.Bilevel(upper, lambda x, y, _: 10 * lower(x, y, None))
    adjoint = aipod.Neumann(10, aipod.Curvature() if sure else 1.0, warm=True)
    y = jnp.full(3, 0.9)
    rates = aipod.stepsize.Rates(jnp.ones((), int), jnp.ones(()))
    turn = aipod.Turn(problem, jnp.zeros(3), y, rates, KEY)
    old = jnp.array([0.01, 0.02, 0.03])
    state = dataclasses.replace(adjoint.init(problem, turn.x, y), z=old)
    z, kept, _ = adjoint.solve(turn, None, state)
    if sure:
        np.testing.assert_array_equal(z, old)
        np.testing.assert_array_equal(kept.z, old)
        # Without an old z the first term has to do: it tells whether the lower level bends down.
        z, *_ = adjoint.solve(turn, None, adjoint.init(problem, turn.x, y))
        np.testing.assert_allclose(z, y - 1.0, rtol=1e-6)
    else:
        assert jnp.linalg.norm(z) > 1e6
