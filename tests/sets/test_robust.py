"""Robust averages: what few liars can do to them, and where their fixed points are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import aipod
from aipod import federated
from aipod.sets import ClippedMean, GeometricMedian, RobustConsensus, TrimmedMean
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper

AVERAGES = [TrimmedMean(0.25), GeometricMedian(), ClippedMean()]
E3 = aipod.E3AiPOD(
    upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, lower_steps=3, adjoint_steps=2, damping=0.0
)
alike = pytest.mark.parametrize("average", AVERAGES, ids=lambda a: type(a).__name__)


def equal(clients):
    return jnp.full(clients, 1 / clients)


def test_the_trimmed_mean_is_scipy_s_and_takes_weights():
    values = np.random.default_rng(0).normal(size=(8, 5))
    found = TrimmedMean(0.25)(jnp.asarray(values), equal(8))
    np.testing.assert_allclose(found, scipy.stats.trim_mean(values, 0.25), rtol=1e-12)
    # A client of twice the weight counts like two clients.
    twice = np.concatenate([values, values[:2]])
    shares = jnp.asarray([2.0, 2.0] + [1.0] * 6) / 10
    np.testing.assert_allclose(
        TrimmedMean(0.2)(jnp.asarray(values), shares),
        scipy.stats.trim_mean(twice, 0.2),
        rtol=1e-12,
    )


def test_the_geometric_median_has_the_least_sum_of_distances():
    values = jnp.asarray(np.random.default_rng(1).normal(size=(7, 4)))
    found = GeometricMedian(200)(values, equal(7))

    def total(point):
        return jnp.sum(jnp.linalg.norm(values - point[None], axis=1))

    assert np.abs(jax.grad(total)(found)).max() < 1e-6
    assert float(total(GeometricMedian()(values, equal(7)))) < 1.001 * float(total(found))


@alike
@pytest.mark.parametrize("lie", [1e12, -1e12, np.inf])
def test_a_quarter_of_the_clients_cannot_carry_it_away(average, lie):
    if not np.isfinite(lie) and not isinstance(average, TrimmedMean):
        pytest.skip("a server does not let infinite numbers in")
    honest = np.random.default_rng(2).normal(size=(9, 6))
    values = jnp.asarray(np.concatenate([honest, np.full((2, 6), lie)]))
    found = np.asarray(average(values, equal(11)))
    spread = np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()
    assert np.linalg.norm(found - honest.mean(axis=0)) < spread
    if isinstance(average, TrimmedMean):
        assert np.all((found >= honest.min(axis=0)) & (found <= honest.max(axis=0)))


@alike
def test_where_clients_agree_nothing_moves(average):
    tree = {"a": jnp.full((5, 2), 0.3), "b": jnp.full((5, 1, 2), -2.0)}
    for set_of in (RobustConsensus(average).project, RobustConsensus(average).tangent):
        for name, leaf in set_of(tree).items():
            np.testing.assert_allclose(leaf, tree[name], rtol=1e-12)


def test_numbers_are_taken_without_the_share_that_may_lie():
    agreement = RobustConsensus(TrimmedMean(0.2))
    values = jnp.array([1.0, 2.0, 3.0, 4.0, 1e9])
    assert float(agreement.largest(values)) == 4.0
    assert float(agreement.summed(values)) == pytest.approx(5 * 3.0)
    assert float(RobustConsensus(TrimmedMean(0.0)).largest(values)) == 1e9


def problem_of(data):
    return federated.federate(ridge_upper, ridge_lower, data, data, batch_size=None)


def robust(problem, average):
    agreement = RobustConsensus(average)
    return dataclasses.replace(problem, upper_set=agreement, lower_set=agreement)


def solved(problem, clients, steps=400):
    x0, y0 = (federated.replicate(jnp.full(3, v), clients) for v in (0.3, -0.2))
    return aipod.solve(problem, E3, x0, y0, steps, key=jax.random.key(0))


def test_without_trimming_it_is_consensus():
    """Points are sent without corrections, and the mean of those is the mean of the points."""
    problem = problem_of(client_data(4, 6))
    plain, found = solved(problem, 4, 30), solved(robust(problem, TrimmedMean(0.0)), 4, 30)
    np.testing.assert_allclose(found.x, plain.x, atol=1e-12)
    np.testing.assert_allclose(found.y, plain.y, atol=1e-12)


@alike
def test_fixed_points_are_where_the_robust_average_of_gradients_is_zero(average):
    """Of clients that differ, with nobody lying: near the solution, and not on it."""
    data = client_data(5, 6)
    problem = problem_of(data)
    found = solved(robust(problem, average), 5, 1500)
    x, y = found.x[0], found.y[0]
    gradients = jnp.stack([jax.grad(ridge_lower, 1)(x, y, one) for one in data])
    left = float(jnp.linalg.norm(average(gradients, equal(5))))
    scale = float(jnp.linalg.norm(gradients, axis=1).max())
    # The radii of ClippedMean and the distances of GeometricMedian do not depend on step sizes.
    assert left < 1e-3 * scale
    assert float(jnp.linalg.norm(jnp.mean(gradients, axis=0))) > 3 * left


def test_clients_that_are_alike_lose_nothing():
    average = GeometricMedian()
    one = client_data(1, 6)[0]
    found = solved(robust(problem_of([one] * 4), average), 4)
    alone = solved(problem_of([one]), 1)
    np.testing.assert_allclose(found.x[0], alone.x[0], atol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), "share must be in"),
        (lambda: GeometricMedian(0), "iterations must be at least 1"),
        (lambda: ClippedMean(0.0), "factor must be positive"),
        (lambda: ClippedMean(1.0, 0), "iterations must be at least 1"),
        (lambda: RobustConsensus().project({"a": jnp.ones(()), "b": jnp.ones(2)}), "client axis"),
    ],
)
def test_bad_arguments_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()
