"""Lower levels with bounds: y* against cvxpy, the hypergradient against differences of F."""

import dataclasses

import cvxpy
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import aipod
from tests.problems import positive_definite
from tests.sets.bounded_kinds import DISTINCT, X, flat

STEP = 1e-5
KINDS = ("box", "simplex", "simplex-rows", "capped", "bounded-budget", "bounded-affine", "product")
PROBLEMS = ((1, False), (2, True), (3, False))


class Lower(eqx.Module):
    """A quadratic, or a logistic loss with a ridge, each with a part that is linear in y and x."""

    hessian: jax.Array
    features: jax.Array
    slope: jax.Array
    mixed: jax.Array
    logistic: jax.Array  # 0 or 1: one program serves both

    def __call__(self, x, y, _):
        v = ravel_pytree(y)[0]
        quadratic = 0.5 * v @ self.hessian @ v
        losses = jnp.sum(jax.nn.softplus(self.features @ v)) + 0.1 * v @ v
        value = jnp.where(self.logistic > 0, losses, quadratic)
        return value + (self.slope + self.mixed @ x) @ v


class Upper(eqx.Module):
    target: jax.Array

    def __call__(self, x, y, _):
        v = ravel_pytree(y)[0]
        return jnp.sum((v - self.target) ** 2) + jnp.sum(v) * jnp.sin(x[0]) + x @ x


def build_problem(poly, seed, logistic):
    rng, d = np.random.default_rng(seed), poly.size
    lower = Lower(
        jnp.asarray(positive_definite(rng, d)),
        jnp.asarray(rng.normal(size=(2 * d, d))),
        jnp.asarray(rng.normal(size=d)),
        jnp.asarray(rng.normal(size=(d, 2))),
        jnp.asarray(float(logistic)),
    )
    upper = Upper(jnp.asarray(rng.normal(size=d)))
    return aipod.Bilevel(upper, lower, lower_set=poly.set)


def margin(poly, problem, y):
    """The least distance from a bound that is not active, or multiplier of one that is."""
    gradient = flat(jax.grad(problem.lower, argnums=1)(X, y, None))
    v, lower, upper = flat(y), np.asarray(poly.lower(X)), np.asarray(poly.upper(X))
    gap = np.minimum(v - lower, upper - v)
    free = gap > 1e-7
    A = poly.A
    if len(A):
        gradient = gradient + A.T @ np.linalg.lstsq(A[:, free].T, -gradient[free], rcond=None)[0]
    return np.min(np.where(free | (lower == upper), np.inf, np.abs(gradient)), initial=np.inf), gap


def by_cvxpy(poly, lower):
    v = cvxpy.Variable(poly.size)
    if lower.logistic > 0:
        losses = cvxpy.sum(cvxpy.logistic(np.asarray(lower.features) @ v))
        value = losses + 0.1 * cvxpy.sum_squares(v)
    else:
        value = 0.5 * cvxpy.quad_form(v, cvxpy.psd_wrap(np.asarray(lower.hessian)))
    low, high = np.asarray(poly.lower(X)), np.asarray(poly.upper(X))
    within = [v[np.isfinite(low)] >= low[np.isfinite(low)]]
    within += [v[np.isfinite(high)] <= high[np.isfinite(high)]]
    if len(poly.A):
        within.append(poly.A @ v == np.asarray(poly.b(X)))
    linear = np.asarray(lower.slope + lower.mixed @ X) @ v
    options = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-13)
    cvxpy.Problem(cvxpy.Minimize(value + linear), within).solve(cvxpy.CLARABEL, **options)
    return v.value


@pytest.mark.parametrize("kind", KINDS)
def test_the_hypergradient_is_the_slope_of_F(kind):
    """Three strictly complementary problems on each kind, with moving bounds and moving totals."""
    poly = DISTINCT[kind](np.random.default_rng(1), 3, coupled=True)
    for seed, logistic in PROBLEMS:
        problem = build_problem(poly, seed, logistic)
        y = aipod.exact_lower(problem, X, poly.like)
        smallest, gap = margin(poly, problem, y)
        assert smallest > 1e-3
        assert np.sum(gap < 1e-12) > 0
        np.testing.assert_allclose(flat(y), by_cvxpy(poly, problem.lower), atol=1e-8)

        def value(x, problem=problem):
            return float(problem.upper(x, aipod.exact_lower(problem, x, poly.like), None))

        slope = [(value(X + s) - value(X - s)) / (2 * STEP) for s in STEP * np.eye(2)]
        found = aipod.exact_hypergradient(problem, X, poly.like)
        np.testing.assert_allclose(found, slope, atol=1e-7 * np.linalg.norm(slope))
        # As if no bound were active.
        marks = jax.tree.map(jnp.zeros_like, poly.set.sides(y, y, X))
        blind = dataclasses.replace(problem, lower_set=poly.set.holding(marks))
        wrong = aipod.hypergradient(blind, X, y, aipod.ConjugateGradient(rtol=1e-12))
        assert np.linalg.norm(wrong - found) > 1e-2 * np.linalg.norm(found)


def test_leaves_of_several_types():
    """What is exact is so in the coarsest of them."""
    mixed = aipod.Product({"a": aipod.Simplex(), "b": aipod.Box(0, 0.3)})
    target = jnp.array([0.4, 0.2, 0.1])

    def lower(x, y, _):
        fine = jnp.sum(jnp.cosh(y["a"] - x)) + 0.5 * jnp.sum((y["a"] - x) ** 2)
        return fine + jnp.sum(jnp.cosh(y["b"] - x.astype(np.float32)))

    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y["a"] - target) ** 2) + jnp.sum(y["b"] * x) + jnp.sum(x**2),
        lower,
        lower_set=mixed,
    )
    x, start = target, {"a": jnp.ones(3) / 3, "b": jnp.zeros(3, np.float32)}
    y = aipod.exact_lower(problem, x, start)
    assert {name: leaf.dtype for name, leaf in y.items()} == {"a": np.float64, "b": np.float32}
    np.testing.assert_allclose(y["b"], [0.3, 0.2, 0.1], atol=1e-6)
    found = aipod.exact_hypergradient(problem, x, start)
    # y_b is x where it is free, and y_a = x + (1 - sum x) / 3, but for the part that cosh bends.
    np.testing.assert_allclose(
        found - jax.grad(lambda x: jnp.sum((x - jnp.mean(x) + 1 / 3 - target) ** 2))(x),
        2 * x + jnp.array([0.3, 0.4, 0.2]),
        atol=1e-5,
    )
