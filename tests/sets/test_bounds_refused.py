"""Bounds and totals that make no sense are refused, with the numbers."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import aipod

Y = jnp.zeros(3)
SUM = np.ones((1, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aipod.Box(1.0, 0.0), r"lower exceeds upper in 1 of 1 .*by 1 in entry 0: 1 > 0"),
        (lambda: aipod.Box([0, 2, 3], [1, 1, 1]), r"in 2 of 3 entries \(by 2 in entry 2: 3 > 1\)"),
        (lambda: aipod.Box({"a": 0.0, "b": np.ones(2)}, 0.5), r"lower exceeds upper in 2 of 3"),
        (lambda: aipod.Box(np.inf), r"lower holds inf.*Box is empty"),
        (lambda: aipod.Box(upper=-np.inf), r"upper holds -inf.*Box is empty"),
        (lambda: aipod.Box(np.nan), r"lower holds NaN"),
        (lambda: aipod.Box("low"), r"lower must be a number or an array of real numbers, got str"),
        (lambda: aipod.Box(None), r"lower must be a number"),
        (lambda: aipod.Box({}), r"lower must be a number, an array or a function of x"),
        (lambda: aipod.Box(np.zeros(3), np.ones(2)), r"upper has shape \(2,\)"),
        (lambda: jax.jit(lambda v: aipod.Box(v).project(Y))(0.0), r"Box was made inside jit"),
        (lambda: aipod.Simplex(-1.0), r"total is -1, but the entries of a Simplex are not neg"),
        (lambda: aipod.Simplex(np.inf), r"total must be finite"),
        (lambda: aipod.Simplex(axis=0.5), r"axis must be one integer or None, got 0.5"),
        (lambda: aipod.Simplex(axis=(0, 1)), r"axis must be one integer or None"),
        (lambda: aipod.CappedSimplex(1.0, -0.1), r"cap must not be negative"),
        (
            lambda: aipod.CappedSimplex(1.0, np.full(3, 0.3)),
            r"empty: the total is 1, but within the bounds the sum lies between 0 and 0.9",
        ),
        (
            lambda: aipod.CappedSimplex([0.5, 2.0], np.full((2, 3), 0.5), axis=-1),
            r"the total is 2, .* between 0 and 1.5",
        ),
        (
            lambda: aipod.Bounded(aipod.Budget(3.0, np.array([1.0, -1.0])), -1.0, 1.0),
            r"the total is 3, .* between -2 and 2",
        ),
        (
            lambda: aipod.Bounded(aipod.Affine(SUM, 3.0), 0.0, 0.5),
            r"no y between lower and upper.*misses by 0.866",
        ),
        (
            lambda: aipod.Bounded(aipod.Flow([0, 0], [1, 1], [-3.0, 3.0]), 0.0, 1.0),
            r"no y between lower and upper",
        ),
        (lambda: aipod.Bounded(aipod.Consensus(), 0.0), r"takes an Affine, .* got Consensus"),
        (lambda: aipod.Bounded(aipod.Simplex(), 0.0), r"takes an Affine, .* got Simplex"),
        (lambda: aipod.Bounded(SUM, 0.0), r"takes an Affine, .* got ndarray"),
        (
            lambda: aipod.Bounded(aipod.Affine(scipy.sparse.eye_array(2001, 2001)), 0.0),
            r"dense matrix of at most 4,000,000 entries, but it has 2001 rows and 2001 columns",
        ),
        (
            lambda: aipod.Bounded(
                aipod.Affine(lx.MatrixLinearOperator(jnp.ones((1, 3))), 1.0), 0.5, 1.0
            ),
            r"no y between lower and upper",
        ),
    ],
)
def test_refused_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("made", "point", "x", "message"),
    [
        (aipod.CappedSimplex(1.0, 0.3), Y, None, r"upper_set is empty: the total is 1, .* 0.9"),
        (aipod.CappedSimplex(1.0, 0.5, axis=0), jnp.zeros((1, 2)), None, r"between 0 and 0.5"),
        (aipod.Bounded(aipod.Budget(4.0), 0.0, 1.0), Y, None, r"the total is 4, .* 0 and 3"),
        (aipod.Simplex(lambda x: x), Y, -1.0, r"upper_set is empty: the total is -1"),
        (aipod.Box(lambda x: x, 1.0), Y, 2.0, r"lower exceeds upper in 3 of 3"),
        (aipod.Box(lambda x: x), Y, np.nan, r"lower is NaN at the given x"),
        (aipod.Box(lambda x: 1j * x), Y, 1.0, r"lower is not real"),
        (aipod.Box(lambda x: x[0]), Y, 1.0, r"lower must be a function of x alone"),
        (aipod.Box(lambda x: jnp.zeros(2)), Y, 1.0, r"lower has shape \(2,\), but the point has"),
        (
            aipod.Box(np.zeros(2)),
            Y,
            None,
            r"lower has shape \(2,\), but the point has shape \(3,\)",
        ),
        (aipod.Box(0.0, {"a": 1.0}), Y, None, r"upper has shape \(\), but the point"),
        (aipod.Box(), jnp.zeros(0), None, r"Box, but the point has no entries"),
        (aipod.Simplex(np.ones(2)), Y, None, r"total has shape \(2,\), but all entries share"),
        (aipod.Simplex(np.ones(2), axis=0), Y, None, r"total has shape \(2,\), but a point"),
        (aipod.Simplex(axis=1), Y, None, r"axis=1, but the point has shape \(3,\)"),
        (aipod.Bounded(aipod.Affine(SUM), 0.0), jnp.zeros(2), None, r"point has shape \(2,\)"),
        (aipod.Bounded(aipod.Budget(1.0, np.ones(2)), 0.0), Y, None, r"one weight is needed"),
        (
            aipod.Bounded(aipod.Affine(SUM, 0.0, coupling=lambda x: -x), 0.0, 1.0),
            Y,
            jnp.array([4.0]),
            r"no y between lower and upper",
        ),
    ],
)
def test_refused_for_a_point(made, point, x, message):
    with pytest.raises(ValueError, match=message):
        made.check(point, x, name="upper_set")


@pytest.mark.parametrize(
    ("made", "x", "expected"),
    [
        (aipod.CappedSimplex(2.0, lambda x: x), 0.5, 0.25),  # 3 / 4 of the total
        (aipod.Simplex(lambda x: x), -1.0, 1.0),
        (aipod.Box(lambda x: x, 1.0), 4.0, 0.75),
        (aipod.Bounded(aipod.Affine(SUM, 0.0, coupling=lambda x: -x), 0.0, 1.0), 6.0, 0.5),
        (aipod.Product([aipod.Box(lambda x: x, 1.0), aipod.Free()]), 2.0, 0.5),
    ],
)
def test_emptiness_is_relative_and_known_under_jit(made, x, expected):
    y = [Y, Y] if isinstance(made, aipod.Product) else Y
    empty = jax.jit(lambda x: made.emptiness(x, y))(jnp.array([x]) if x == 6.0 else jnp.array(x))
    np.testing.assert_allclose(empty, expected, rtol=1e-6)


def test_emptiness_needs_a_point_where_numbers_stand_for_all_entries():
    with pytest.raises(ValueError, match="pass like=y"):
        aipod.CappedSimplex(1.0, 0.5).emptiness()
