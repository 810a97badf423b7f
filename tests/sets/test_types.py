"""Every set keeps the floating type of every leaf, and computes in no less than float32."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import aipod

MIXED = [
    (jnp.float32, jnp.float64),
    (jnp.float64, jnp.float32),
    (jnp.float32, jnp.bfloat16),
    (jnp.float16, jnp.float64),
    (jnp.float32, jnp.float32),
]
RNG = np.random.default_rng(0)
FEW, MANY = RNG.normal(size=(2, 8)), RNG.normal(size=(6, 8))
CENTRE = RNG.normal(size=8)
# Points with a client axis of length 4, which the other sets need not know about.
VALUES = {"a": RNG.normal(size=(4, 1)), "b": RNG.normal(size=(4, 1))}
X = jnp.array([0.3, -0.7])


def operator():
    """A Lineax operator on the dictionary itself."""
    structure = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, VALUES))

    def rows(y):
        return jnp.asarray(FEW) @ jnp.concatenate([y["a"].ravel(), y["b"].ravel()])

    return lx.FunctionLinearOperator(rows, structure)


def shift(x):
    return jnp.asarray(FEW) @ jnp.full(8, jnp.sin(x[0]))


SETS = {
    "free": aipod.Free(),
    "budget": aipod.Budget(1.5),
    "budget-weighted": aipod.Budget(1.5, {k: np.abs(v) + 0.1 for k, v in VALUES.items()}),
    "budget-coupled": aipod.Budget(1.5, coupling=jnp.sum),
    "affine": aipod.Affine(FEW, FEW @ CENTRE),
    "affine-kernel": aipod.Affine(MANY, MANY @ CENTRE),
    "affine-single": aipod.Affine(jnp.asarray(FEW, jnp.float32), FEW @ CENTRE),
    "affine-coupled": aipod.Affine(FEW, FEW @ CENTRE, coupling=shift),
    "affine-matrix": aipod.Affine(FEW, FEW @ CENTRE, coupling=FEW[:, :2]),
    "sparse": aipod.Affine(scipy.sparse.csr_array(FEW), FEW @ CENTRE),
    "sparse-coupled": aipod.Affine(scipy.sparse.csr_array(FEW), FEW @ CENTRE, coupling=shift),
    "operator": aipod.Affine(operator(), FEW @ CENTRE),
    "consensus": aipod.Consensus(),
    "consensus-weighted": aipod.Consensus([1.0, 2.0, 3.0, 5.0]),
    "product": aipod.Product({"a": aipod.Budget(2.0), "b": aipod.Consensus([1.0, 2.0, 3.0, 5.0])}),
}


def point(first, second):
    return {"a": jnp.asarray(VALUES["a"], first), "b": jnp.asarray(VALUES["b"], second)}


def answers(made, y, x):
    fixed = made.at(x)
    one = fixed.for_round(jax.random.key(1))
    return {
        "project": made.project(y, x),
        "tangent": made.tangent(y),
        "cotangent": made.cotangent(y),
        "riesz": made.riesz(y),
        "anchor": made.anchor(x, like=y),
        "follow": made.follow(y, x),
        "moved": jax.jvp(lambda x: made.follow(y, x), (x,), (jnp.ones_like(x),))[1],
        "fixed": fixed.project(y),
        "directions": made.directions().project(y),
        "round": one.project(y),
        "round-directions": one.tangent(y),
        "corrected": one.project_corrected(y, jax.tree.map(jnp.zeros_like, y)),
        "kept": one.keep_absent(y, y),
    }


def assert_typed(found, wide, like):
    """The types of `like`, and the values of `wide` to their precision."""
    for leaf, exact, old in zip(*map(jax.tree.leaves, (found, wide, like)), strict=True):
        assert leaf.dtype == old.dtype
        precision = float(jnp.finfo(old.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(leaf, float), np.asarray(exact), rtol=0, atol=30 * precision + 1e-6
        )


@pytest.mark.parametrize("types", MIXED, ids=lambda t: "-".join(np.dtype(d).name for d in t))
@pytest.mark.parametrize("name", SETS)
def test_every_leaf_keeps_its_type(name, types):
    y = point(*types)
    found = answers(SETS[name], y, X)
    # The same numbers, but all in float64.
    exact = answers(SETS[name], jax.tree.map(lambda leaf: leaf.astype(float), y), X)
    for question in found:
        assert_typed(found[question], exact[question], y)


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 5.0]])
def test_rounds_with_absent_clients_keep_types(weights, participation):
    made = aipod.Consensus(weights, participation)
    y = point(jnp.float32, jnp.bfloat16)
    exact = answers(made, jax.tree.map(lambda leaf: leaf.astype(float), y), X)
    for question, found in answers(made, y, X).items():
        assert_typed(found, exact[question], y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flows_keep_their_type(dtype):
    made = aipod.Flow([0, 0, 1], [2, 1, 2], np.array([[-1.0, 0.0, 1.0]] * 2))
    y = jnp.asarray(RNG.normal(size=(2, 3)), dtype)
    for question, found in answers(made, y, X).items():
        assert_typed(found, answers(made, y.astype(float), X)[question], y)


def test_integers_are_not_rounded_away():
    """A mean of integers, or a share of a budget, is no integer."""
    whole = jnp.array([[1], [2], [4]])
    np.testing.assert_allclose(aipod.Consensus([1.0, 1.0, 2.0]).project(whole)[0], [2.75])
    some = aipod.Consensus(participation=0.7).for_round(jax.random.key(0)).project(whole)
    assert jnp.issubdtype(some.dtype, jnp.floating)
    np.testing.assert_allclose(aipod.Budget(1.0).project(jnp.zeros(4, int)), np.full(4, 0.25))
    line = aipod.Affine(np.ones((1, 4)), 1.0)
    np.testing.assert_allclose(line.project({"a": jnp.zeros(4, int)})["a"], np.full(4, 0.25))


def test_sums_in_half_precision_do_not_overflow():
    # 70,000 ones are beyond the largest float16, 65,504.
    y = jnp.ones(70_000, jnp.float16)
    np.testing.assert_allclose(aipod.Budget(0.0).project(y), 0.0, atol=1e-3)
    # 1/3 + 2/3 in bfloat16 is not 1: clients that agree would be moved.
    agreed = jnp.full((3, 1), 1.0, jnp.bfloat16)
    np.testing.assert_array_equal(aipod.Consensus([1.0, 1.0, 7.0]).project(agreed), agreed)


def test_a_solver_runs_on_mixed_types():
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y["a"] - 1.0) ** 2) + jnp.sum(y["b"] ** 2) + jnp.sum(x**2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y["a"] - x) ** 2) + 0.5 * jnp.sum(y["b"] ** 2),
        lower_set=aipod.Budget(1.0),
    )
    y = {"a": jnp.zeros(2, jnp.float32), "b": jnp.zeros(3)}
    solver = aipod.EAiPOD(upper_lr=0.2, lower_lr=0.3, lower_prob=0.5, adjoint_lr=0.5)
    solution = aipod.solve(problem, solver, jnp.zeros(2), y, steps=5, key=jax.random.key(0))
    assert solution.y["a"].dtype == jnp.float32
    assert solution.y["b"].dtype == jnp.float64
