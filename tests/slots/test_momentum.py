"""Optimisers that move y and u where the averages of the clients meet."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from tests.algorithms.test_e3 import FEDERATION, KEY, Forgetful, ForgetfulAdjoint, error, solved
from tests.problems import quadratic

OPTIMISERS = {
    "damped": optax.sgd(0.5),
    "heavy-ball": optax.sgd(1.0, momentum=0.5),
    "nesterov": optax.sgd(1.0, momentum=0.9, nesterov=True),
    "restarted": aipod.restarted_momentum(0.98),
}


def solver(lower=None, adjoint=None):
    return aipod.E3AiPOD(
        upper_lr=0.1,
        lower_steps=10,
        adjoint_steps=5,
        lower_optimizer=lower,
        adjoint_optimizer=adjoint,
    )


@pytest.mark.parametrize("name", OPTIMISERS)
def test_fixed_points_are_the_exact_solution(name):
    one = OPTIMISERS[name]
    assert error(FEDERATION, solved(FEDERATION, solver(one, one), 400)) < 1e-10


@pytest.mark.parametrize(
    "one",
    [optax.adam(1e-3), optax.adagrad(0.1), optax.rmsprop(0.1), *OPTIMISERS.values()],
)
def test_every_optimiser_rests_where_the_average_is_the_start(one):
    mover = aipod.slots._momentum.Mover(one, True)
    start = jnp.ones((3, 2))
    np.testing.assert_array_equal(mover(start, start, mover.init(start))[0], start)


@pytest.mark.parametrize("kind", ["r", "e"])
def test_without_a_correction_momentum_stalls_too(kind):
    one = solver()
    if kind == "r":
        one = dataclasses.replace(one, lower=Forgetful(one.lower.lr, one.lower.steps))
    else:
        one = dataclasses.replace(one, adjoint=ForgetfulAdjoint(5, one.adjoint.lr))
    assert error(FEDERATION, solved(FEDERATION, one, 300)) > 1e-2


def test_sgd_with_rate_1_is_the_plain_average_to_the_last_bit():
    """start + (ybar - start) would differ by rounding."""
    mover = aipod.slots._momentum.Mover(optax.sgd(1.0), True)
    start, average = (jnp.broadcast_to(v, (3, 2)) for v in (jnp.array([1e8, 3.0]), jnp.pi))
    new, _ = mover(start, average, mover.init(start))
    np.testing.assert_array_equal(new, average)


def test_momentum_is_quicker_where_the_lower_level_is_flat():
    """One client: grad y is slow along directions with a thousandth of the curvature."""
    scales = jnp.logspace(-3, 0, 8)[None]

    def gap(optimizer):
        start = jnp.ones((1, 8))
        problem = aipod.Bilevel(
            lambda x, y, _: 0.5 * jnp.sum(x**2),
            lambda x, y, _: 0.5 * jnp.sum(scales * y**2),
            aipod.Consensus(),
            aipod.Consensus(),
        )
        found = aipod.E3AiPOD(upper_lr=0.1, lower_lr=1.0, lower_optimizer=optimizer)
        solution = aipod.solve(problem, found, jnp.zeros((1, 1)), start, 200, key=KEY)
        return float(jnp.linalg.norm(solution.y))

    # 4,000 steps of 1 / l alone: exp(-4). With momentum the root of the condition counts.
    assert gap(optax.sgd(1.0)) > 1e-2
    assert gap(None) < 1e-4


def test_a_velocity_that_points_uphill_is_forgotten():
    one = aipod.restarted_momentum(0.9)
    g = jnp.array([1.0, 0.0])
    state = one.init(g)
    for _ in range(5):
        change, state = one.update(g, state)
    assert change[0] < -2
    change, state = one.update(-g, state)
    # As in a first step: 1 + 1 / 4.
    np.testing.assert_allclose(change, [1.25, 0.0])
    assert state.age == 1


def test_one_row_is_kept_and_y_is_common():
    state = solver().init(FEDERATION.problem, *FEDERATION.start())
    assert state.lower.momentum.trace.shape == (1, 4)
    assert state.adjoint.momentum.trace.shape == (1, 4)


def test_without_clients_nothing_is_kept():
    case = quadratic()
    state = aipod.E3AiPOD().init(case.problem, case.x, case.y)
    assert state.lower.momentum is None
    assert state.adjoint.momentum is None


@pytest.mark.parametrize("name", ["lower_optimizer", "adjoint_optimizer"])
def test_misuse(name):
    with pytest.raises(ValueError, match=f"{name} must be an optax.GradientTransformation"):
        aipod.E3AiPOD(**{name: 0.9})
    case = quadratic()
    one = aipod.E3AiPOD(**{name: optax.sgd(1.0)})
    with pytest.raises(ValueError, match="for federations and lower levels without constraints"):
        one.init(case.problem, case.x, case.y)
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        aipod.restarted_momentum(1.0)


def test_a_free_lower_level_may_have_momentum():
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - 1) ** 2) + 0.5 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    )
    one = aipod.E3AiPOD(upper_lr=0.3, lower_lr=0.5, lower_optimizer=aipod.restarted_momentum())
    solution = aipod.solve(problem, one, jnp.zeros(2), jnp.zeros(2), 100, key=jax.random.key(0))
    np.testing.assert_allclose(solution.x, 0.5, atol=1e-10)
