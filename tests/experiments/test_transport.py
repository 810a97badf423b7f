"""Learning a transport cost against POT's Sinkhorn and against the closed form of the best fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ot
import pytest

import aipod
from aipod.experiments.tasks import transport
from aipod.experiments.tasks.entropy import entropy, logarithm

OPTIONS = transport.Options(homes=4, works=3, journeys=5000, temperature=8.0)


@pytest.fixture(scope="module")
def city():
    return transport.city(OPTIONS)


@pytest.fixture(scope="module")
def task():
    return transport.build(OPTIONS)


@pytest.fixture(scope="module")
def point():
    rng = np.random.default_rng(1)
    people = rng.normal(size=4) / 4
    cost = np.asarray(transport.centred(jnp.asarray(5 * rng.normal(size=(4, 3)))))
    return {"cost": jnp.asarray(cost), "people": jnp.asarray(people - people.mean())}


def plan(city, cost, people):
    """Y*(x) by POT."""
    cost, people = np.asarray(cost), np.asarray(people)
    homes = np.exp(people) / np.exp(people).sum()
    jobs = city.shares.sum(axis=0)
    return ot.sinkhorn(homes, jobs, cost, OPTIONS.temperature, stopThr=1e-15, numItermax=10_000)


@pytest.mark.parametrize(
    ("function", "plain"),
    [(entropy, lambda y: y * np.log(y)), (logarithm, np.log)],
)
def test_the_continuation_joins_smoothly_and_is_finite_everywhere(function, plain):
    floor, above = 0.01, np.array([0.010001, 0.3, 2.0])
    np.testing.assert_allclose(function(jnp.asarray(above), floor), plain(above), rtol=1e-12)

    @jax.jit
    def derivatives(points):
        parts = lambda y: function(y, floor)  # noqa: E731
        slope = jax.grad(parts)
        return jnp.stack([jax.vmap(f)(points) for f in (parts, slope, jax.grad(slope))])

    at = derivatives(jnp.array([floor * (1 - 1e-9), floor * (1 + 1e-9), -1.0]))
    np.testing.assert_allclose(at[:, 0], at[:, 1], rtol=1e-6)
    assert np.all(np.isfinite(at))
    # Strongly convex (the entropy) or concave (the logarithm) below the floor as well.
    assert at[2, 2] > 0 if function is entropy else at[2, 2] < 0


def test_the_city_is_seen_through_its_own_plan(city):
    homes, jobs = (city.shares.sum(axis=axis) for axis in (1, 0))
    np.testing.assert_allclose(
        transport.sinkhorn(city.cost / 8, homes, jobs),
        ot.sinkhorn(homes, jobs, city.cost, 8.0, stopThr=1e-15),
        atol=1e-12,
    )
    assert len(city.journeys) == 5000
    assert city.crosses.any()
    np.testing.assert_allclose(city.cost - city.distance, 10.0 * city.crosses)
    # 5,000 draws: each share within 5 standard deviations of the plan that they come from.
    drawn = transport.city(dataclasses.replace(OPTIONS, journeys=200_000)).shares
    assert np.all(np.abs(drawn - city.shares) < 5 * np.sqrt(city.shares / 5000))


def test_the_marginals_are_sums_and_one_is_redundant():
    table = np.arange(12.0).reshape(4, 3)
    sums = transport.marginals(4, 3)
    np.testing.assert_allclose(sums @ table.ravel(), np.append(table.sum(1), table.sum(0)))
    assert np.linalg.matrix_rank(sums) == 6 == len(sums) - 1


def test_the_lower_level_is_sinkhorns_plan(task, city, point):
    found = aipod.exact_lower(task.problem, point, task.y0)
    np.testing.assert_allclose(found, plan(city, **point), atol=1e-9)


def test_the_hypergradient_is_that_of_sinkhorn(task, city, point):
    """Central differences of the likelihood of POT's plan, along the upper set."""
    found = aipod.exact_hypergradient(task.problem, point, task.y0)

    def objective(step, along):
        moved = jax.tree.map(lambda a, b: np.asarray(a + step * b), point, along)
        return -np.sum(city.shares * np.log(plan(city, **moved)))

    rng = np.random.default_rng(2)
    for _ in range(3):
        along = {"cost": rng.normal(size=(4, 3)), "people": rng.normal(size=4)}
        along = task.problem.upper_set.tangent(jax.tree.map(jnp.asarray, along))
        expected = (objective(1e-4, along) - objective(-1e-4, along)) / 2e-4
        np.testing.assert_allclose(optax.tree.vdot(found, along), expected, rtol=1e-5)


def test_a_run_finds_the_best_fit_and_with_it_the_true_cost(task, city):
    """C = -eps log(shares), centred: the likelihood's maximum, whatever a_i + b_j is added."""
    problem = dataclasses.replace(
        task.problem, upper_samples=aipod.FullBatch(task.problem.upper_samples.data)
    )
    solver = aipod.Alternating(
        lower=aipod.ProjectedSGD(lr=aipod.Curvature(), steps=50),
        adjoint=aipod.ConjugateGradient(rtol=1e-10),
        upper=aipod.EveryStep(optimizer=optax.adam(0.2)),
    )
    solution = aipod.solve(problem, solver, task.x0, task.y0, steps=600, key=jax.random.key(0))
    x, y = solution.feasible()
    fit = np.asarray(transport.centred(jnp.asarray(-8 * np.log(city.shares))))
    np.testing.assert_allclose(x["cost"], fit, atol=1e-3)
    np.testing.assert_allclose(y, city.shares, atol=1e-5)
    # The fit itself is as far from the truth as 5,000 journeys leave it: about
    # eps / sqrt(journeys of a pair), and the rarest pair has 119.
    truth = np.asarray(transport.centred(jnp.asarray(city.cost)))
    rarest = city.shares.min() * 5000
    assert np.abs(np.asarray(x["cost"]) - truth).max() < 3 * 8 / np.sqrt(rarest)


@pytest.mark.parametrize(
    "change",
    [{"homes": 1}, {"works": 0}, {"journeys": 0}, {"temperature": 0.0}, {"river": -1.0}],
)
def test_impossible_options_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        transport.Options(**change)
