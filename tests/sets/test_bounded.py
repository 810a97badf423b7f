"""Projections on sets with bounds: against the conditions of optimality, and against cvxpy."""

import cvxpy
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aipod
from tests.sets.bounded_kinds import DISTINCT, KINDS, MADE_DENSE, Polyhedron, X, flat


# The set is an argument, so sets of one shape share one compilation.
@eqx.filter_jit
def projected(set_, y, x=None):
    return set_.project(y, x)


@eqx.filter_jit
def answers(set_, near, y, x=None):
    return set_.residual(near, x), set_.residual(y, x), set_.emptiness(x, y), set_.at(x)


def missed(poly: Polyhedron, y: np.ndarray, p: np.ndarray) -> float:
    """By how much y - p = A'm + multipliers of the right sign fails, for the best m."""
    low, high = p <= poly.lower(X) + 1e-9, p >= poly.upper(X) - 1e-9
    unit = np.eye(poly.size)
    columns = [poly.A.T, -poly.A.T, -unit[:, low], unit[:, high]]
    return scipy.optimize.nnls(np.concatenate(columns, axis=1), y - p)[1]


def by_cvxpy(poly: Polyhedron, y: np.ndarray) -> np.ndarray:
    lower, upper, b = (np.asarray(side(X)) for side in (poly.lower, poly.upper, poly.b))
    p, low, high = cvxpy.Variable(poly.size), np.isfinite(lower), np.isfinite(upper)
    held = [p[low] >= lower[low], p[high] <= upper[high]]
    if len(poly.A):
        held.append(poly.A @ p == b)
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(p - y)), held)
    goal = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    program.solve(solver=cvxpy.CLARABEL, **goal)
    return p.value


def look_at(poly: Polyhedron, scale: float, rng: np.random.Generator, x=None) -> tuple:
    """A point and its projection, which is what it must be."""
    u, v = rng.normal(size=(2, poly.size)) * scale
    near = flat(projected(poly.set, poly.tree(v), x))
    # Feasible, idempotent, non-expansive.
    assert np.max(np.abs(poly.A @ near - poly.b(X)), initial=0.0) < 1e-10
    assert np.all(near >= poly.lower(X) - 1e-10)
    assert np.all(near <= poly.upper(X) + 1e-10)
    again = flat(projected(poly.set, poly.tree(near), x))
    np.testing.assert_allclose(again, near, rtol=0, atol=1e-10)
    apart = near - flat(projected(poly.set, poly.tree(u), x))
    assert np.linalg.norm(apart) <= np.linalg.norm(v - u) * (1 + 1e-12) + 1e-12
    # The conditions of optimality, which only the projection satisfies.
    assert missed(poly, v, near) < 1e-10 * max(1.0, scale)
    return v, near


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), small=st.booleans(), far=st.floats(-1, 2))
@example(seed=0, small=False, far=3.0)
def test_project_finds_the_nearest_point_as_cvxpy_does(name, seed, small, far):
    rng = np.random.default_rng(seed)
    poly = KINDS[name](rng, 1 if small and name not in MADE_DENSE else 3)
    v, near = look_at(poly, 10.0**far, rng)
    if far <= 1:  # with larger numbers cvxpy loses digits
        np.testing.assert_allclose(near, by_cvxpy(poly, v), rtol=0, atol=1e-8)


@pytest.mark.parametrize("build", DISTINCT.values(), ids=DISTINCT)
def test_a_set_that_moves_is_the_same_set_with_its_numbers_at_x(build):
    rng = np.random.default_rng(1)
    poly = build(rng, 3, coupled=True)
    v, near = look_at(poly, 1.0, rng, X)
    y = poly.tree(v)
    residual, before, emptiness, fixed = answers(poly.set, poly.tree(near), y, X)
    assert np.max(np.abs(flat(residual))) < 1e-10
    assert np.max(np.abs(flat(before))) > 0.01 * np.max(np.abs(v - near))
    assert emptiness < 1e-12
    assert poly.set.coupled
    assert not fixed.coupled
    np.testing.assert_allclose(flat(fixed.project(y)), near, rtol=0, atol=1e-12)
    poly.set.check(y, X)
    with pytest.raises(ValueError, match="moves with x"):
        poly.set.project(y)


@pytest.mark.parametrize("name", ["box", "simplex", "capped-rows", "bounded-affine"])
def test_a_batch_of_projections(name):
    poly = KINDS[name](np.random.default_rng(2), 3)
    many = np.random.default_rng(3).normal(size=(4, poly.size)) * np.array([[1], [9], [0.1], [30]])
    trees = [poly.tree(v) for v in many]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    together = jax.jit(jax.vmap(poly.set.project))(stacked)
    for number, tree in enumerate(trees):
        one = jax.tree.map(lambda leaf, n=number: leaf[n], together)
        np.testing.assert_allclose(flat(one), flat(poly.set.project(tree)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("made", "y", "expected"),
    [
        (aipod.Box(2.0, 2.0), [1.0, 5.0], [2.0, 2.0]),
        (aipod.Box(), [1.0, -5.0], [1.0, -5.0]),
        (aipod.Box(lower=0.0), [1.0, -5.0], [1.0, 0.0]),
        (aipod.Simplex(3.0), [7.0], [3.0]),
        (aipod.Simplex(0.0), [7.0, 8.0], [0.0, 0.0]),
        (aipod.CappedSimplex(2.0, 1.0), [7.0, -8.0], [1.0, 1.0]),
        (aipod.CappedSimplex(0.0, 1.0), [7.0, -8.0], [0.0, 0.0]),
        (aipod.CappedSimplex(1.0, np.inf), [7.0, -8.0], [1.0, 0.0]),
        (aipod.Bounded(aipod.Budget(1.0)), [1.0, 1.0], [0.5, 0.5]),
        (aipod.Bounded(aipod.Free(), 0.0, 1.0), [2.0, -1.0], [1.0, 0.0]),
        (aipod.Bounded(aipod.Affine(np.ones((2, 2)), 2.0), 1.0, 1.0), [9.0, 0.0], [1.0, 1.0]),
        (aipod.Bounded(aipod.Affine(np.zeros((1, 2)), 0.0), 0.0), [-1.0, 3.0], [0.0, 3.0]),
    ],
)
def test_known_projections(made, y, expected):
    np.testing.assert_allclose(made.project(jnp.array(y)), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("kind", ["few", "many", "far"])
def test_a_million_entries_in_single_precision(kind):
    scale, shift = {"few": (1.0, 0.0), "many": (1e-7, 1e-6), "far": (1.0, 100.0)}[kind]
    rng = np.random.default_rng(0)
    y = (shift + scale * rng.normal(size=10**6)).astype(np.float32)
    with jax.enable_x64(False):
        near = np.asarray(projected(aipod.Simplex(), jnp.asarray(y)))
    assert near.dtype == np.float32
    ordered = np.sort(y.astype(np.float64))[::-1]
    thresholds = (np.cumsum(ordered) - 1) / np.arange(1, y.size + 1)
    exact = np.maximum(y - thresholds[np.sum(ordered > thresholds) - 1], 0.0)
    assert abs(near.sum(dtype=np.float64) - 1) < 1e-6
    assert np.sum(np.abs(near - exact)) < 1e-5 * (1 + shift)


def test_points_keep_their_data_types():
    y = {"a": jnp.ones(3, jnp.float16), "b": jnp.ones(2, jnp.float32)}
    for made in (aipod.Box(0.0, 0.5), aipod.Simplex(), aipod.CappedSimplex(1.0, 0.3)):
        near = made.project(y)
        assert jax.tree.map(lambda leaf: leaf.dtype, near) == {"a": jnp.float16, "b": jnp.float32}


@pytest.mark.parametrize(
    ("made", "point", "expected"),
    [
        (aipod.Box(0.0, 1.0), jnp.zeros(3), (6, 0)),
        (aipod.Box(lower=0.0), jnp.zeros(3), (3, 0)),
        (aipod.Box(upper=lambda x: x), jnp.zeros(3), (3, 0)),
        (aipod.Simplex(), jnp.zeros(3), (4, 1)),
        (aipod.Simplex(axis=-1), jnp.zeros((2, 3)), (8, 2)),
        (aipod.Bounded(aipod.Affine(np.ones((2, 3))), -1.0, 1.0), jnp.zeros(3), (8, 1)),
    ],
)
def test_constraints_are_equalities_and_finite_bounds(made, point, expected):
    assert made.constraints(point) == expected
    assert made.constrained


def test_examples_have_the_shape_of_a_point_where_it_is_known():
    assert aipod.Box(0.0, 1.0).example() is None
    assert aipod.Simplex().example() is None
    assert aipod.Box({"a": np.zeros(3), "b": 0.0}, 1.0).example() is None
    assert aipod.Box(0.0, np.ones((2, 3))).example().shape == (2, 3)
    assert aipod.Bounded(aipod.Affine(np.ones((1, 4))), 0.0).example().shape == (4,)
    assert aipod.Bounded(aipod.Flow([0], [1], np.zeros((3, 2))), 0.0).example().shape == (3, 1)
