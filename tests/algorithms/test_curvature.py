"""`Curvature` on problems whose curvature changes, from batch to batch or as x moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated

SOLVERS = {
    "AiPOD": aipod.AiPOD,
    "E-AiPOD": aipod.EAiPOD,
    "E2-AiPOD": aipod.E2AiPOD,
    "E3-AiPOD": aipod.E3AiPOD,
}
pytestmark = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def growing(rotated, seed=0):
    """g = 1/2 sum exp(2 x_i) ((Q y)_i - 1)^2 while x runs to 3: curvatures from 1 to 403."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0] if rotated else np.eye(6)
    goal = jnp.asarray([3.0, 0.5, 1.0, 0.0, 2.0, 1.0])
    return aipod.Bilevel(
        upper=lambda x, y, _: 0.5 * jnp.sum((x - goal) ** 2) + 0.01 * jnp.sum((basis @ y - 2) ** 2),
        lower=lambda x, y, _: 0.5 * jnp.sum(jnp.exp(2 * x) * (basis @ y - 1) ** 2),
    )


@pytest.mark.parametrize("rotated", [False, True], ids=["diagonal", "rotated"])
def test_directions_that_were_flat_are_seen_when_they_grow(solver, rotated):
    found = aipod.solve(
        growing(rotated),
        solver(upper_lr=0.05),
        jnp.zeros(6),
        jnp.zeros(6),
        400,
        key=jax.random.key(1),
    )
    truth = float(jnp.exp(2 * jnp.max(found.x)))
    assert truth > 300
    assert float(found.state.curvature.estimate) > 0.7 * truth
    np.testing.assert_allclose(found.y, jnp.linalg.solve(_basis(rotated), jnp.ones(6)), atol=1e-3)


def _basis(rotated):
    rng = np.random.default_rng(0)
    return jnp.asarray(np.linalg.qr(rng.normal(size=(6, 6)))[0] if rotated else np.eye(6))


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "t4"])
def test_batches_of_one_do_not_diverge(solver, heavy):
    """Ridge regression; the curvature of a batch of 1 is |a|^2, here between 1 and several 100."""
    rng = np.random.default_rng(0)
    features = rng.standard_t(4, (400, 10)) if heavy else rng.normal(size=(400, 10))
    truth = rng.normal(size=10)
    train = features, features @ truth + 0.1 * rng.normal(size=400)
    other = rng.normal(size=(100, 10))

    def error(y, batch):
        return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)

    problem = aipod.Bilevel(
        upper=lambda x, y, batch: error(y, batch),
        lower=lambda x, y, batch: error(y, batch) + 0.5 * jnp.exp(x[0]) * jnp.sum(y**2),
        upper_samples=aipod.Minibatches((other, other @ truth), 1),
        lower_samples=aipod.Minibatches(train, 1),
    )
    for seed in range(4):
        found = aipod.solve(
            problem,
            solver(upper_lr=0.05),
            jnp.full(1, -2.0),
            jnp.zeros(10),
            400,
            key=jax.random.key(seed),
            throw=False,
        )
        assert found.result is aipod.Result.completed
        assert float(jnp.linalg.norm(found.y - truth)) < 0.8 * float(jnp.linalg.norm(truth))


def test_a_jump_in_a_federation_is_taken_back(solver):
    """The largest curvature is known one step late: it grows e^6-fold in about ten steps."""
    steep = jnp.asarray(np.linspace(2.0, 4.0, 5).reshape(5, 1, 1))
    problem = federated.federate(
        lambda x, y, batch: 0.5 * jnp.sum((x - 1.5) ** 2),
        lambda x, y, batch: 0.5 * jnp.exp(batch[0, 0] * x[0]) * jnp.sum((y - 1) ** 2),
        steep,
        steep,
        batch_size=None,
    )
    start = federated.replicate(jnp.zeros(1), 5), federated.replicate(jnp.zeros(4), 5)
    found = aipod.solve(problem, solver(upper_lr=0.9), *start, 200, key=jax.random.key(0))
    np.testing.assert_allclose(found.x, 1.5, atol=1e-6)
    np.testing.assert_allclose(found.y, 1.0, atol=1e-3)


def test_flat_at_the_start_and_steep_beyond(solver):
    """g = y + y^4 / 4 has no curvature at 0: one step of 1 / 0 would never come back."""
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(x**2),
        lower=lambda x, y, _: jnp.sum(100 * y + 25 * y**4),
    )
    found = aipod.solve(
        problem, solver(upper_lr=0.1), jnp.ones(2), jnp.zeros(2), 300, key=jax.random.key(0)
    )
    np.testing.assert_allclose(found.y, -1.0, atol=1e-4)
