"""The portfolio against cvxpy, and against the closed form of its lower level in NumPy."""

import dataclasses

import cvxpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod.experiments.tasks import portfolio

OPTIONS = portfolio.Options()


@pytest.fixture(scope="module")
def task():
    return portfolio.build(OPTIONS)


@pytest.fixture(scope="module")
def point(task):
    """Somewhere on the upper set, away from the start."""
    shift = np.array([0.3, -0.1, 0.2, -0.5, 0.1])
    x = {"exposures": task.x0["exposures"] + shift, "log_aversion": jnp.asarray(3.0)}
    assert float(jnp.abs(task.problem.upper_set.residual(x)["exposures"])) < 1e-12
    return x


def moments(returns):
    return np.cov(returns.T, bias=True), returns.mean(axis=0)


def constraints(data):
    return np.vstack([np.ones(20), data.loadings.T])


def optimality(data, aversion):
    """The lower level's stationarity on the set, as a linear system in (y, multipliers)."""
    covariance, _ = moments(data.train)
    A = constraints(data)
    hessian = aversion / 100 * covariance + OPTIONS.ridge * np.eye(20)
    return np.block([[hessian, A.T], [A, np.zeros((6, 6))]])


def objective(data, exposures, log_aversion):
    """F in NumPy."""
    right = np.concatenate([data.train.mean(axis=0), [1.0], exposures])
    y = np.linalg.solve(optimality(data, np.exp(log_aversion)), right)[:20]
    return y @ moments(data.validation)[0] @ y


def test_the_facts():
    data = portfolio.market()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [252, 100, 100]
    assert (data.weeks[251], data.weeks[351]) == ("2019-01-04", "2020-12-29")
    assert data.factors == ("MTUM", "QUAL", "SIZE", "USMV", "VLUE")
    assert np.linalg.matrix_rank(constraints(data)) == 6


def test_the_lower_level_is_the_quadratic_program_of_cvxpy(task, point):
    data = portfolio.market()
    covariance, means = moments(data.train)
    y = cvxpy.Variable(20)
    risk = float(np.exp(point["log_aversion"])) / 100 * cvxpy.quad_form(y, covariance)
    program = cvxpy.Problem(
        cvxpy.Minimize(0.5 * risk - means @ y + 0.5 * OPTIONS.ridge * cvxpy.sum_squares(y)),
        [cvxpy.sum(y) == 1, data.loadings.T @ y == np.asarray(point["exposures"])],
    )
    program.solve(solver=cvxpy.CLARABEL)
    found = aipod.exact_lower(task.problem, point)
    np.testing.assert_allclose(found, y.value, atol=1e-6)


def test_the_hypergradient_is_that_of_the_closed_form(task, point):
    data = portfolio.market()
    found = aipod.exact_hypergradient(task.problem, point)
    flat = np.append(point["exposures"], point["log_aversion"])
    steps = 1e-5 * np.eye(6)
    slopes = [
        (
            objective(data, *np.split(flat + step, [5]))
            - objective(data, *np.split(flat - step, [5]))
        )
        / 2e-5
        for step in steps
    ]
    expected = np.ravel(slopes)
    np.testing.assert_allclose(found["exposures"], expected[:5], rtol=1e-6)
    np.testing.assert_allclose(found["log_aversion"], expected[5], rtol=1e-6)


def test_the_chosen_exposures_are_those_of_cvxpy(task):
    """For the risk aversion that the run found, no exposures do better.

    The lower level's optimality is linear in (x, y, multipliers): one quadratic program.
    """
    data = portfolio.market()
    problem = dataclasses.replace(
        task.problem,
        upper_samples=aipod.FullBatch(jnp.asarray(data.validation)),
        lower_samples=aipod.FullBatch(jnp.asarray(data.train)),
    )
    solver = aipod.Alternating(
        lower=aipod.ProjectedSGD(lr=aipod.Curvature(), steps=50),
        adjoint=aipod.ConjugateGradient(rtol=1e-8),
        upper=aipod.EveryStep(optimizer=optax.adam(0.05)),
    )
    solution = aipod.solve(problem, solver, task.x0, task.y0, steps=500, key=jax.random.key(0))
    x, _ = solution.feasible()
    value = objective(data, np.asarray(x["exposures"]), float(x["log_aversion"]))

    system = optimality(data, float(np.exp(x["log_aversion"])))
    unknowns, exposures = cvxpy.Variable(26), cvxpy.Variable(5)
    right = cvxpy.hstack([data.train.mean(axis=0), np.ones(1), exposures])
    program = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.quad_form(unknowns[:20], moments(data.validation)[0])),
        [system @ unknowns == right, cvxpy.sum(exposures) == float(np.sum(task.x0["exposures"]))],
    )
    best = program.solve(solver=cvxpy.CLARABEL)
    assert best <= value + 1e-6
    np.testing.assert_allclose(value, best, rtol=1e-4)
    np.testing.assert_allclose(x["exposures"], exposures.value, atol=0.02)


@pytest.mark.parametrize("name", ["risk_aversion", "ridge", "batch_size"])
def test_impossible_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        portfolio.Options(**{name: 0})


def test_long_only_weights_are_those_of_a_quadratic_program():
    options = portfolio.Options(long_only=True, cap=0.15)
    task, data = portfolio.build(options), portfolio.market()
    x = {"exposures": task.x0["exposures"] + 0.1, "log_aversion": jnp.asarray(3.0)}
    found = aipod.exact_lower(task.problem, x, task.y0)
    covariance, mean = moments(data.train)
    y = cvxpy.Variable(20)
    risk = 0.5 * np.exp(3.0) / 100 * cvxpy.quad_form(y, cvxpy.psd_wrap(covariance))
    away = cvxpy.sum_squares(data.loadings.T @ y - np.asarray(x["exposures"]))
    value = risk - mean @ y + 0.5 * options.ridge * cvxpy.sum_squares(y)
    value = value + 0.5 * options.closeness * away
    within = [cvxpy.sum(y) == 1, y >= 0, y <= 0.15]
    cvxpy.Problem(cvxpy.Minimize(value), within).solve(cvxpy.CLARABEL)
    np.testing.assert_allclose(found, y.value, atol=1e-6)
    assert np.sum(found < 1e-12) >= 3
    assert np.sum(found > 0.15 - 1e-12) >= 1
    solver = aipod.EAiPOD(lower_steps=20, adjoint_steps=60)
    solution = aipod.solve(task.problem, solver, task.x0, task.y0, 300, key=jax.random.key(0))
    before, after = (task.record(x, solution.y)["volatility"] for x in (task.x0, solution.x))
    assert after < 0.97 * before


def test_a_cap_that_leaves_no_portfolio_is_refused():
    with pytest.raises(ValueError, match="cap"):
        portfolio.Options(long_only=True, cap=0.04)
