"""Clients that lie in the simulation, and a defence that holds where a mean fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.experiments import load
from aipod.experiments.attacks import ATTACKS, Attacked, defended
from aipod.sets import Consensus


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_first_clients_lie_and_the_others_do_not(attack):
    messages = jax.random.normal(jax.random.key(0), (6, 4))
    sent = Attacked(Consensus(), 2, attack, jax.random.key(1))._sent(messages)
    np.testing.assert_array_equal(sent[2:], messages[2:])
    assert np.abs(sent[:2] - messages[:2]).min() > 1e-3
    nobody = Attacked(Consensus(), 0, attack)
    np.testing.assert_allclose(nobody.project(messages), Consensus().project(messages))


@pytest.mark.parametrize("defence", ["none", "trimmed-mean", "geometric-median", "clipped-mean"])
def test_a_defence_holds_where_the_mean_is_carried_away(defence):
    honest = jnp.ones((8, 3)) + 0.01 * jax.random.normal(jax.random.key(0), (8, 3))
    messages = jnp.concatenate([jnp.ones((2, 3)), honest])
    found = Attacked(defended(defence, 0.3), 2, "scaled").project(messages)[0]
    assert (np.abs(found - 1).max() < 0.05) == (defence != "none")


@pytest.mark.parametrize(
    ("attack", "defence"), [("scaled", "trimmed-mean"), ("label-flip", "none")]
)
def test_the_experiment_runs(attack, defence):
    experiment = load("byzantine")
    options = experiment.options(clients=5, hidden=8, attack=attack, defence=defence)
    assert options.liars == 1
    task = experiment.build(options)
    if attack == "label-flip":
        clean = load("hyper-representation").build(
            load("hyper-representation").options(clients=5, hidden=8, partition="iid")
        )
        for mine, theirs in (
            (task.problem.lower_samples, clean.problem.lower_samples),
            (task.problem.upper_samples, clean.problem.upper_samples),
        ):
            wrong, right = (np.asarray(s.batch.data[1]) for s in (mine, theirs))
            np.testing.assert_array_equal(wrong[:1], 9 - right[:1])
            np.testing.assert_array_equal(wrong[1:], right[1:])
        return
    solver = aipod.E3AiPOD(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05, damping=0.0)
    with jax.numpy_rank_promotion("allow"):
        solution = aipod.solve(
            *(task.problem, solver, task.x0, task.y0, 15),
            key=jax.random.key(0),
            record=task.record,
            every=15,
        )
    assert solution.history["accuracy"][-1] > 0.3


def test_half_of_the_clients_is_too_many():
    with pytest.raises(ValueError, match="attackers must be less than"):
        load("byzantine").options(attackers=0.5)
