"""A coupling may leave the range of A while x moves: sets say by how much."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import aipod
from aipod.sets._types import tolerance

# Two rows that repeat each other: both must ask for the same value.
A = np.ones((2, 3))
C = np.array([4.0, 4.0])
Y = jnp.zeros(3)


def apart(x):
    """Rows that ask for the same where x = 0, and for values 2 x apart elsewhere."""
    return jnp.stack([x, -x])


MADE = {
    "dense": aipod.Affine(A, C, coupling=apart),
    "sparse": aipod.Affine(scipy.sparse.csr_array(A), C, coupling=apart),
    "operator": aipod.Affine(lx.MatrixLinearOperator(jnp.asarray(A)), C, coupling=apart),
    "matrix": aipod.Affine(A, C, coupling=np.array([[1.0], [-1.0]])),
    "product": aipod.Product([aipod.Budget(1.0), aipod.Affine(A, C, coupling=apart)]),
}


def point(name):
    return [Y, Y] if name == "product" else Y


@eqx.filter_jit
def emptiness(made, x, like):
    return made.emptiness(x, like)


@pytest.mark.parametrize("name", MADE)
def test_emptiness_is_the_relative_miss_of_the_nearest_point(name):
    made = MADE[name]
    for x, expected in [(0.0, 0.0), (1.0, 1.0 / 5.0), (40.0, 40.0 / 44.0)]:
        # c - h(x) = (4 - x, 4 + x); the nearest y gives both rows 4 and misses by x.
        found = emptiness(made, jnp.asarray(x), point(name))
        assert found.shape == ()
        np.testing.assert_allclose(found, expected, atol=1e-10)
        assert (found > tolerance((x, found))) == (expected > 0)


@pytest.mark.parametrize("name", MADE)
def test_emptiness_is_what_the_projection_misses(name):
    made, x = MADE[name], jnp.asarray(2.0)
    miss = made.residual(made.project(point(name), x), x)
    worst = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(miss))
    # The largest of c and c - h(x) is 4 + x.
    np.testing.assert_allclose(made.emptiness(x, point(name)), worst / 6.0, rtol=1e-8)


def test_a_flow_whose_demand_stops_adding_up_is_empty():
    made = aipod.Flow(
        [0], [1], np.zeros((2, 2)), coupling=lambda x: jnp.array([[1.0, -1.0], [x, -1.0]])
    )
    np.testing.assert_allclose(made.emptiness(jnp.array(1.0)), 0.0, atol=1e-12)
    np.testing.assert_allclose(made.emptiness(jnp.array(3.0)), 1.0 / 3.0, rtol=1e-10)


@pytest.mark.parametrize(
    "made",
    [
        aipod.Free(),
        aipod.Budget(1.0, coupling=jnp.sum),
        aipod.Consensus(),
        aipod.Consensus(participation=0.5),
        aipod.Product([aipod.Free(), aipod.Budget(1.0)]),
        MADE["dense"].directions(),
    ],
)
def test_sets_that_always_have_a_point_say_zero(made):
    assert float(made.emptiness(jnp.array(5.0), None)) == 0.0


def test_a_set_without_rows_or_with_zeros_alone_is_not_empty():
    for matrix in (np.zeros((0, 3)), np.zeros((2, 3))):
        made = aipod.Affine(matrix, 0.0, coupling=lambda x, matrix=matrix: x * matrix[:, 0])
        assert float(made.emptiness(jnp.array(5.0), Y)) == 0.0


def test_rounding_is_not_emptiness():
    # c - h(x) is rounding error of a large c in single precision.
    x = jnp.asarray(1e6, jnp.float32)
    close = aipod.Affine(
        jnp.asarray(A, jnp.float32), 1e6, coupling=lambda x: jnp.stack([x, x * (1 + 1e-7)])
    )
    assert 0 < float(close.emptiness(x, Y)) < tolerance(x)
    # Couplings in the range of A, up to rounding.
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(6, 2)), rng.normal(size=(2, 9))
    low = left @ right
    made = aipod.Affine(
        low, low @ np.ones(9), coupling=lambda x: low @ jnp.sin(x * jnp.arange(9.0))
    )
    for x in np.linspace(-30.0, 30.0, 7):
        assert float(made.emptiness(jnp.asarray(x))) < 1e-4 * tolerance(x)


def test_emptiness_of_a_nan_is_no_zero():
    assert np.isnan(MADE["dense"].emptiness(jnp.array(jnp.nan)))


def test_a_fixed_set_remembers_that_it_is_empty():
    made = MADE["dense"]
    np.testing.assert_allclose(made.at(jnp.array(1.0)).emptiness(), 0.2, rtol=1e-10)

    class Own(aipod.sets.AbstractSet):
        base: aipod.Affine = eqx.field(default_factory=lambda: MADE["dense"])

        @property
        def coupled(self):
            return True

        def project(self, y, x=None):
            return self.base.project(y, x)

        def tangent(self, v):
            return self.base.tangent(v)

        def anchor(self, x=None, *, like=None):
            return self.base.anchor(x, like=like)

        def residual(self, y, x=None):
            return self.base.residual(y, x)

        def emptiness(self, x=None, like=None):
            return self.base.emptiness(x, like)

    np.testing.assert_allclose(Own().at(jnp.array(1.0)).emptiness(like=Y), 0.2, rtol=1e-10)


def test_a_run_that_leaves_the_range_is_seen_at_its_end():
    """x starts where both rows agree, so that `check` finds nothing, and is drawn away to 1."""
    problem = aipod.Bilevel(
        upper=lambda x, y, _: (x - 1.0) ** 2 + 0.0 * jnp.sum(y),
        lower=lambda x, y, _: 0.5 * jnp.sum(y**2),
        lower_set=MADE["dense"],
    )
    x = jnp.zeros(())
    solver = aipod.AiPOD(upper_lr=0.3, lower_lr=0.5)
    solution = aipod.solve(problem, solver, x, Y, steps=20, key=jax.random.key(0))
    assert float(problem.lower_set.emptiness(x, Y)) < tolerance((x, Y))
    np.testing.assert_allclose(problem.lower_set.emptiness(solution.x, solution.y), 0.2, rtol=1e-2)


def test_a_rough_x_does_not_make_a_set_look_empty():
    """h(x) computed in bfloat16 is in the range of A only to that precision."""
    low = np.array([[1.0, 2.0], [1.1, 2.2]])
    made = aipod.Affine(low, low @ np.ones(2), coupling=lambda x: jnp.asarray(low, x.dtype) @ x)
    made.check(jnp.zeros(2), jnp.array([0.3, 0.7], jnp.bfloat16))
