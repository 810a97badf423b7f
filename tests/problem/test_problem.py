"""Corners of problems that once went wrong."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from tests.problems import quadratic

KEY = jax.random.key(4)


def plain(lower, upper=lambda x, y, _: jnp.sum((y - x) ** 2)):
    return aipod.Bilevel(upper, lower)


def test_exact_lower_may_start_at_the_solution():
    problem = plain(lambda x, y, _: 0.5 * jnp.sum((y - 3 * x) ** 2))
    x = jnp.arange(3.0)
    y = aipod.exact_lower(problem, x, jnp.zeros(3))
    np.testing.assert_allclose(aipod.exact_lower(problem, x, y), 3 * x, atol=1e-12)
    np.testing.assert_allclose(aipod.exact_lower(problem, 0 * x, 0 * y), 0, atol=1e-12)


def test_a_lower_level_without_a_minimiser_is_not_solved():
    problem = plain(lambda x, y, _: jnp.sum(jnp.exp(-y)))
    with pytest.raises(RuntimeError, match="not solved"):
        aipod.exact_lower(problem, jnp.zeros(2), jnp.zeros(2))


def test_objectives_may_have_their_own_reverse_rule():
    @jax.custom_vjp
    def square(v):
        return v**2

    square.defvjp(lambda v: (v**2, v), lambda v, g: (2 * v * g,))
    custom = plain(lambda x, y, _: jnp.sum(square(y - jnp.sin(x))))
    ordinary = plain(lambda x, y, _: jnp.sum((y - jnp.sin(x)) ** 2))
    x, y = jnp.arange(3.0), jnp.ones(3)
    for adjoint in (aipod.ConjugateGradient(), aipod.Neumann(3, lr=0.2)):
        np.testing.assert_allclose(
            aipod.hypergradient(custom, x, y, adjoint),
            aipod.hypergradient(ordinary, x, y, adjoint),
            rtol=1e-12,
        )


def test_curvature_is_that_of_the_steps_also_when_clients_weigh_differently():
    """A light client with a steep loss: its own steps must not be too long."""
    steep, weights = jnp.array([100.0, 1.0]), np.array([1.0, 100.0])

    def loss(x, y, curvature):
        return 0.5 * curvature[0] * jnp.sum((y - x) ** 2)

    data = steep[:, None]
    problem = aipod.federated.federate(loss, loss, data, data, batch_size=None, weights=weights)
    start = aipod.federated.replicate(jnp.ones(2), 2)
    solver = aipod.EAiPOD(upper_lr=1e-3, lower_prob=0.2, lower_steps=20)
    solution = aipod.solve(problem, solver, start, 2 * start, 30, key=KEY)
    assert solution.history["curvature"][-1] == pytest.approx(100.0, rel=1e-6)
    assert solution.result is aipod.Result.completed


def test_leaves_that_are_no_arrays_are_named():
    model = eqx.nn.MLP(2, 2, 4, 1, key=KEY)
    problem = plain(lambda x, y, _: jnp.sum(y(x)))
    with pytest.raises(ValueError, match=r"y0 holds a .*equinox\.partition"):
        problem.check(jnp.zeros(2), model)


def test_an_objective_that_raises_is_quoted():
    problem = plain(lambda x, y, _: jnp.sum(jnp.ones((2, 5)) @ y))
    with pytest.raises(ValueError, match=r"lower\(x, y, batch\) raised TypeError on .*\(3,\)"):
        problem.check(jnp.zeros(3), jnp.zeros(3))


def test_repeated_exact_values_compile_once():
    case = quadratic()
    aipod.exact_lower(case.problem, case.x, case.y)
    count = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: count.append(name)
    )
    aipod.exact_lower(case.problem, np.asarray(case.x) + 1, case.y)
    compiled = [name for name in count if "backend_compile" in name]
    jax.monitoring.clear_event_listeners()
    assert len(compiled) <= 2  # at most the small operations around the Newton program
