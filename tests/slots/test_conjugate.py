"""Conjugate gradients: in single precision, with many unknowns, and where they cannot succeed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.slots.adjoint._iterate import conjugate_gradients

KEY = jax.random.key(0)


@pytest.mark.parametrize("size", [1_000, 42_500, 1_000_000])
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["identity", "spread"])
def test_the_hypergradient_in_single_precision(size, spread):
    """y* = x whatever the weights, so grad F = x - c in closed form."""
    weights = jnp.linspace(1.0, spread, size, dtype=jnp.float32)
    c, x = (jax.random.normal(key, (size,), jnp.float32) for key in jax.random.split(KEY))
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - c) ** 2),
        lambda x, y, _: 0.5 * jnp.sum(weights * (y - x) ** 2),
    )
    found = aipod.hypergradient(problem, x, x)
    assert found.dtype == jnp.float32
    assert float(jnp.linalg.norm(found - (x - c))) < 1e-4 * float(jnp.linalg.norm(x - c))
    np.testing.assert_allclose(aipod.exact_lower(problem, x, x + 1), x, atol=1e-4)


def test_against_a_dense_solve():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(40, 40))
    matrix, right = root @ root.T + 0.1 * np.eye(40), rng.normal(size=40)
    found = conjugate_gradients(
        lambda v: jnp.asarray(matrix) @ v, jnp.asarray(right), tolerance=1e-12, max_steps=400
    )
    np.testing.assert_allclose(found.value, np.linalg.solve(matrix, right), rtol=1e-8)
    assert float(found.residual) <= 1e-12
    assert 0 < float(found.curvature) <= np.linalg.eigvalsh(matrix)[-1]


def test_negative_curvature_ends_the_iteration_and_is_told():
    matrix = jnp.asarray(np.diag([2.0, 1.0, -1.0]))
    found = conjugate_gradients(lambda v: matrix @ v, jnp.ones(3), tolerance=1e-12, max_steps=100)
    assert float(found.curvature) < 0
    assert np.isfinite(found.value).all()
    assert int(found.steps) < 5


def test_a_residual_that_stalls_ends_the_iteration_at_its_best_point():
    """A condition number of 1e8 in single precision: 1e-6 cannot be reached."""
    rng = np.random.default_rng(1)
    basis, _ = np.linalg.qr(rng.normal(size=(60, 60)))
    matrix = jnp.asarray(basis @ np.diag(np.logspace(-8, 0, 60)) @ basis.T, jnp.float32)
    right = jnp.asarray(rng.normal(size=60), jnp.float32)
    found = conjugate_gradients(lambda v: matrix @ v, right, tolerance=1e-9, max_steps=10**9)
    assert int(found.steps) < 10_000
    assert np.isfinite(found.value).all()
    # The residual that is reported is one that was seen, not the last.
    true = np.linalg.norm(np.asarray(matrix, float) @ np.asarray(found.value, float) - right)
    assert true < 2 * float(jnp.linalg.norm(right))


def test_a_zero_right_hand_side_needs_no_step():
    found = conjugate_gradients(lambda v: 2 * v, jnp.zeros(5), tolerance=1e-9, max_steps=10)
    assert int(found.steps) == 0
    np.testing.assert_array_equal(found.value, jnp.zeros(5))


def test_cleaning_with_batches_runs_on():
    """Weights of examples on batches, in single precision: with Lineax's iteration this was NaN."""
    rng = np.random.default_rng(2)
    inputs = jnp.asarray(rng.normal(size=(2000, 200)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 10, 2000))

    def losses(y, batch):
        scores = batch[0] @ y
        picked = jnp.take_along_axis(scores, batch[1][:, None], 1)[:, 0]
        return jax.nn.logsumexp(scores, axis=1) - picked

    index = jnp.arange(2000)
    problem = aipod.Bilevel(
        lambda x, y, batch: jnp.mean(losses(y, batch)),
        lambda x, y, batch: (
            jnp.mean(jax.nn.sigmoid(x[batch[2]]) * losses(y, batch)) + 1e-3 * jnp.sum(y**2)
        ),
        upper_samples=aipod.Minibatches((inputs[:500], labels[:500]), 256),
        lower_samples=aipod.Minibatches((inputs, labels, index), 256),
    )
    solver = aipod.Alternating(
        aipod.ProjectedSGD(lr=0.1), aipod.ConjugateGradient(), aipod.EveryStep(lr=1.0)
    )
    x0, y0 = jnp.zeros(2000, jnp.float32), jnp.zeros((200, 10), jnp.float32)
    solution = aipod.solve(problem, solver, x0, y0, 100, key=KEY)
    assert solution.result is aipod.Result.completed
    assert np.isfinite(solution.x).all()
