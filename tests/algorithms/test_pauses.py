"""Large federations look at their curvature in few outer steps, and notice what they miss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.stepsize import _pauses, pause_between_looks
from aipod.stepsize._pauses import _ALWAYS, _PAUSE

KEY = jax.random.key(0)
M = 12
# The outer step from which on the curvature of some clients is another one.
CHANGE = 100


@pytest.fixture
def many(monkeypatch):
    """A federation of twelve counts as large."""
    monkeypatch.setattr(_pauses, "_MANY", M)


def quadratics(curvature, batch_size=None, **options):
    """g_m = curvature(x, m)/2 |y - t_m|^2; x moves by 1 in every outer step, whatever f is."""
    targets = np.random.default_rng(0).normal(size=(M, 1, 3))
    data = (targets, np.arange(M)[:, None])

    def lower(x, y, batch):
        target, number = batch[0][0], batch[1][0]
        return 0.5 * jnp.sum(curvature(x[0], number) * (y - target) ** 2)

    def upper(x, y, batch):
        return -x[0] + 0.0 * jnp.sum(y)

    problem = federated.federate(upper, lower, data, data, batch_size=batch_size, **options)
    x, y = (federated.replicate(v, M) for v in (jnp.zeros(1), jnp.zeros(3)))
    return problem, x, y


def still(x, number):
    return jnp.array([1.0, 2.0, 3.0])


def run(curvature, steps, **options):
    problem, x, y = quadratics(curvature, **options)
    solver = aipod.E3AiPOD(upper_lr=1.0)
    return aipod.solve(problem, solver, x, y, steps=steps, key=KEY, throw=False, every=1)


def looks(solution):
    """In each outer step the batches that were looked at for the curvature."""
    samples = np.diff(solution.history["samples"], prepend=0)
    return (samples - np.min(samples)) // M


def test_most_steps_do_not_look(many):
    found = looks(run(still, 60))
    late = found[_ALWAYS + 1 :]
    assert set(late) == {0, 1}
    assert np.all(np.diff(np.flatnonzero(late)) == _PAUSE)


def test_small_federations_look_in_every_step():
    found = looks(run(still, 60))
    assert np.all(found[1:] == found[-1])


def test_the_same_curvature_is_found(many, monkeypatch):
    paused = run(still, 60)
    assert float(paused.state.curvature.estimate) == pytest.approx(3.0, rel=1e-6)
    monkeypatch.setattr(_pauses, "_MANY", M + 1)
    always = run(still, 60)
    np.testing.assert_allclose(paused.y, always.y, atol=1e-10)


def test_growth_is_followed_step_by_step(many):
    """A curvature that grows by a tenth in every step is looked at in each of them."""

    def grows(x, number):
        return 1.1 ** jnp.clip(x - 50, 0, 40) * still(x, number)

    solution = run(grows, 140)
    assert solution.result.ok
    begun = np.flatnonzero(looks(solution)[51:92])[0]
    assert np.all(looks(solution)[51 + begun : 90] == 1)
    exact = 3 * 1.1**40
    assert 0.99 * exact < float(solution.state.curvature.estimate) < 1.2 * exact


def test_a_fall_is_followed_step_by_step(many, monkeypatch):
    """Otherwise steps stay too short for twice as long as in a small federation."""

    def falls(x, number):
        return jnp.where(x < 50, 1.0, 0.01) * still(x, number)

    paused = run(falls, 120)
    begun = 50 + np.flatnonzero(looks(paused)[50:])[0]
    assert np.all(looks(paused)[begun : begun + 60] == 1)
    monkeypatch.setattr(_pauses, "_MANY", M + 1)
    always = run(falls, 120)
    # The look that notices comes up to a pause later, and forgets for up to four steps at once.
    apart = always.state.curvature.estimate / paused.state.curvature.estimate
    assert 0.95**4.1 < float(apart) < 0.95**-3.1


def jumps(x, number):
    """One client becomes fifty times stiffer, between two looks."""
    factor = jnp.where((x >= CHANGE + 2) & (number == 5), 50.0, 1.0)
    return factor * still(x, number)


def test_a_jump_that_nobody_saw_is_noticed_by_the_local_steps(many):
    solution = run(jumps, CHANGE + 60)
    assert solution.result.ok
    assert float(solution.state.curvature.estimate) > 100
    # y did not leave: the average of the targets, weighted by their curvatures.
    targets = np.random.default_rng(0).normal(size=(M, 1, 3))[:, 0]
    weights = np.where(np.arange(M) == 5, 50.0, 1.0)[:, None]
    wanted = np.sum(weights * targets, 0) / np.sum(weights)
    np.testing.assert_allclose(solution.y[0], wanted, atol=0.3)


def test_without_that_notice_the_run_is_thrown_off(many, monkeypatch):
    """So the test above tells something."""
    monkeypatch.setattr("aipod.stepsize._tempering._RUNS_AWAY", np.inf)
    solution = run(jumps, CHANGE + 8)
    assert not np.all(np.abs(solution.y) < 1e3)


def test_a_settled_run_does_not_take_rounding_errors_for_a_runaway(many):
    """y is at its solution; every step that was taken back would show as one more look."""
    late = looks(run(still, 400))[300:]
    assert np.sum(late) <= len(late) // _PAUSE + 1


@pytest.mark.parametrize(
    ("options", "pause"),
    [
        ({}, _PAUSE),
        ({"weights": np.arange(1.0, M + 1)}, _PAUSE),
        ({"participation": 0.5}, 1),
        # Small batches differ: in a held-out ridge problem of 1,200 clients the run was thrown off.
        ({"batch_size": 1}, 1),
    ],
)
def test_who_pauses(many, options, pause):
    problem, _, y = quadratics(still, **options)
    assert pause_between_looks(problem, y, watched=True) == pause
    assert pause_between_looks(problem, y, watched=False) == 1
    alone = dataclasses.replace(problem, upper_set=aipod.Free(), lower_set=aipod.Free())
    assert pause_between_looks(alone, y, watched=True) == 1


def test_other_methods_look_in_every_step(many):
    problem, x, y = quadratics(still)
    solution = aipod.solve(problem, aipod.AiPOD(upper_lr=1.0), x, y, steps=60, key=KEY, every=1)
    assert np.all(looks(solution)[1:] == looks(solution)[-1])
