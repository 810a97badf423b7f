"""x and y of a federation on Flower kept in sets: what the simulation computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import federated, flower
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.test_flower import CLIENTS, SEED, serve

SETS = {"upper_set": aipod.Box(0.1, 0.5), "lower_set": aipod.CappedSimplex(1.0, 0.5)}


@pytest.fixture(scope="module")
def bounded():
    data = client_data(CLIENTS, 6)
    problem = federated.federate(
        ridge_upper, ridge_lower, data, data, batch_size=3, weights=[1.0, 2.0, 3.0], **SETS
    )
    return problem, *(federated.replicate(jnp.full(3, v), CLIENTS) for v in (0.3, 0.4))


def start_of(task, **sets):
    x0, y0 = (tree[0] for tree in task[1:])
    return lambda _: flower.Start(x0, y0, lambda x, y: {"x": x[0], "y": y[0]}, **sets)


@pytest.mark.parametrize(
    "solver",
    [
        aipod.E3AiPOD(lower_steps=3, upper_optimizer=optax.adam(0.05)),
        aipod.EAiPOD(upper_lr=0.1, lower_steps=3, lower_prob=0.5, adjoint_steps=2),
        aipod.AiPOD(upper_lr=0.1, lower_lr=0.1, lower_steps=2, adjoint_steps=2, adjoint_lr=0.1),
    ],
    ids=["E3-AiPOD", "E-AiPOD", "AiPOD"],
)
def test_the_trajectory_and_the_rounds_are_the_simulation_s(bounded, solver, tmp_path):
    steps = 4
    simulated = aipod.solve(
        *(bounded[0], solver, *bounded[1:], steps),
        key=jax.random.key(SEED),
        record=lambda x, y: {name: federated.average(v) for name, v in (("x", x), ("y", y))},
        every=1,
    )
    _, columns, words, error = serve(
        bounded,
        solver,
        tmp_path,
        {"outer-steps": steps, "every": 1},
        start=start_of(bounded, **SETS),
    )
    assert error is None
    x = simulated.history["x"][-1]
    np.testing.assert_allclose(columns["history:x"][-1], x, atol=1e-10)
    if simulated.kept.y.shape[0] == 1:
        # Elsewhere clients have their own y between rounds.
        y = columns["history:y"][-1]
        np.testing.assert_allclose(y, simulated.history["y"][-1], atol=1e-10)
        assert y.max() == 0.5
    assert x.min() >= 0.1
    assert x.max() <= 0.5
    assert words["progress"]["rounds"] == simulated.ledger.rounds


def test_a_server_with_other_sets_is_refused(bounded, tmp_path):
    sets = SETS | {"lower_set": aipod.CappedSimplex(1.0, 0.6)}
    error = serve(
        bounded,
        aipod.E3AiPOD(),
        tmp_path,
        {"outer-steps": 1, "wait": 1},
        start=start_of(bounded, **sets),
        look=False,
    )
    assert "solver" in str(error)


# What privacy and secure sums can cover: numbers for the step sizes and the damping.
FIXED = aipod.E3AiPOD(
    upper_lr=0.3, lower_lr=0.1, adjoint_lr=0.1, lower_steps=3, adjoint_steps=2, damping=0.0
)


TIGHT = SETS | {"lower_set": aipod.CappedSimplex(1.0, 0.38)}


@pytest.fixture(scope="module")
def alike():
    """Three clients with the same data: their corrections are zero, as those of privacy."""
    data = client_data(1, 6) * CLIENTS
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=None, **TIGHT)
    return problem, *(federated.replicate(jnp.full(3, v), CLIENTS) for v in (0.3, 0.4))


@pytest.mark.parametrize("privacy", [None, flower.Privacy(clip=50.0, noise=1e-9)])
def test_privacy_and_secure_sums_keep_to_the_sets(alike, tmp_path, privacy):
    """Every client projects the averages: under masks, and with what noise has made of them.

    The noise is next to nothing, to see that the run is the simulation's.
    """
    steps = 5
    simulated = aipod.solve(*(alike[0], FIXED, *alike[1:], steps), key=jax.random.key(SEED))
    _, columns, _, error = serve(
        alike,
        FIXED,
        tmp_path,
        {"outer-steps": steps, "secure": True},
        start=start_of(alike, **TIGHT),
        privacy=privacy,
    )
    assert error is None
    x, y = (columns[f"history:{name}"][-1] for name in "xy")
    np.testing.assert_allclose(x, simulated.x[0], atol=1e-6)
    np.testing.assert_allclose(y, simulated.y[0], atol=1e-6)
    assert y.max() == pytest.approx(0.38, abs=1e-12)


def test_noise_does_not_lead_out_of_the_sets(bounded, tmp_path):
    _, columns, _, error = serve(
        bounded,
        FIXED,
        tmp_path,
        {"outer-steps": 8},
        start=start_of(bounded, **SETS),
        privacy=flower.Privacy(clip=0.2, noise=5.0),
    )
    assert error is None
    x, y = (columns[f"history:{name}"] for name in "xy")
    assert x.min() >= 0.1
    assert x.max() <= 0.5
    # It has met the bounds of both sets.
    assert np.isclose(x, 0.1).any()
    assert np.isclose(y, 0.5).any()
    assert y.min() >= 0
    np.testing.assert_allclose(y.sum(axis=1), 1.0, atol=1e-9)
