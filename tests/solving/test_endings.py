"""How runs end: on a plateau, and in divergence with its cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from tests.problems import synthetic
from tests.solving.test_convergence import bowl, solver

KEY = jax.random.key(3)


def solve(noise, steps, **options):
    start = jnp.ones(3)
    return aipod.solve(bowl(noise), solver(0.3), start, start, steps, key=KEY, **options)


@pytest.mark.parametrize("noise", [None, 0.1])
def test_patience_ends_on_a_plateau(noise):
    """Not before F has decreased as far as it goes, and long before the last step."""
    stop = aipod.Stop(patience=100)
    found = solve(noise, 20_000, stop=stop, every=10_000)
    assert found.result is aipod.Result.plateau
    assert found.result.ok
    step = int(found.state.step)
    assert 100 <= step < 2_000
    assert found.history["step"][-1] == step
    long = solve(noise, 5_000)
    share = [float(jnp.sum(s.x**2)) / 3 for s in (found, long)]
    assert share[0] < max(10 * share[1], 1e-4)
    # A run that has just ended so, and goes on, ends at once.
    assert "no longer decreased" in found.message


def test_patience_does_not_end_a_descent():
    found = solve(None, 60, stop=aipod.Stop(patience=1))
    assert found.result is aipod.Result.completed


def test_a_plateau_does_not_depend_on_how_a_run_is_cut(tmp_path, monkeypatch):
    stop = aipod.Stop(patience=100)
    whole = solve(0.1, 20_000, stop=stop)
    solve(0.1, 57, stop=stop, checkpoint=tmp_path)
    monkeypatch.setattr("aipod.solving._run._CHUNK_SECONDS", 1e-9)
    resumed = solve(0.1, 20_000, stop=stop, checkpoint=tmp_path, resume=True)
    assert resumed.result is aipod.Result.plateau
    for left, right in zip(
        jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    again = solve(0.1, 20_000, stop=stop, checkpoint=tmp_path, resume=True)
    assert again.result is aipod.Result.plateau
    assert int(again.state.step) == int(whole.state.step)


def diverged(problem, method, x, y):
    found = aipod.solve(problem, method, x, y, 20_000, key=KEY, throw=False, every=20_000)
    assert found.result is aipod.Result.diverged
    return found.message


ONES = jnp.ones(2)


def lower(sign):
    return aipod.Bilevel(
        lambda x, y, _: jnp.sum((x - 1) ** 2) + jnp.sum(y**2),
        lambda x, y, _: sign * 0.5 * jnp.sum((y - x) ** 2),
    )


@pytest.mark.parametrize(
    "method",
    [
        aipod.AiPOD(upper_lr=0.01),
        aipod.AiPOD(upper_lr=0.01, lower_lr=0.5, adjoint_lr=0.5),
        aipod.E3AiPOD(upper_lr=0.01, damping=0.0),
    ],
)
def test_a_concave_lower_level_is_called_so(method):
    assert "it is not convex in y there" in diverged(lower(-1.0), method, ONES, ONES)


def test_long_steps_are_told_apart_by_their_level():
    case = synthetic(8)
    long = aipod.AiPOD(upper_lr=0.02, lower_lr=30.0, adjoint_lr=1.0)
    message = diverged(case.problem, long, case.x, case.y)
    assert (
        "curvature of the lower level was underestimated: it is 1, and lower_lr was 30" in message
    )
    assert "lower_lr=15" in message
    message = diverged(lower(1.0), aipod.AiPOD(upper_lr=30.0), ONES, ONES)
    assert "the steps on x were too long" in message
    assert "upper_lr=15" in message


def test_a_federation_with_weights_says_why_it_diverged():
    """All clients have the same y, of which one row is kept, where the last window began."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(6, 2)), rng.normal(size=6)) for _ in range(3)]

    def loss(x, y, batch):
        return jnp.mean((batch[0] @ y - batch[1]) ** 2) + jnp.sum(jnp.exp(x) * y**2)

    problem = aipod.federated.federate(
        loss, loss, data, data, batch_size=6, weights=[1.0, 2.0, 3.0], epochs=True
    )
    point = aipod.federated.replicate(jnp.zeros(2), 3)
    solver = aipod.VRAiPOD(upper_lr=0.1, lower_lr=30.0, adjoint_lr=0.1)
    key = jax.random.key(0)
    end = aipod.solve(problem, solver, point, point, steps=400, key=key, throw=False)
    assert end.result is aipod.Result.diverged
    assert "lower_lr was 30 where at most" in end.message
