"""Skipped projections on a set that moves with x: y does not end an outer step far off it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated

KEY = jax.random.key(0)


def run(lower_lr, coupling, steps=60, prob=0.02):
    """How far y is off after each outer step, as a share of what y = 0 is off; and projections."""
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - 2.0) ** 2) + 0.01 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum(jnp.array([1.0, 2.0, 4.0]) * (y - x) ** 2),
        lower_set=aipod.Affine(jnp.ones((1, 3)), 3.0, coupling),
    )
    # x is driven by a long step, and carries the set along.
    solver = aipod.EAiPOD(upper_lr=0.05, lower_lr=lower_lr, lower_prob=prob)

    def record(x, y):
        off, scale = (problem.lower_set.residual(point, x) for point in (y, jnp.zeros(3)))
        return {"off": jnp.abs(off / scale).max()}

    start = jnp.ones(3), jnp.ones(3)
    solution = aipod.solve(problem, solver, *start, steps, key=KEY, record=record, every=1)
    return np.asarray(solution.history["off"]), solution.ledger.lower_projections


def moving(x):
    return -jnp.sum(x)[None]


def test_y_is_brought_back_and_the_projections_are_counted():
    numbers, few = run(0.1, moving)
    followed, more = run(aipod.Curvature(), moving)
    assert numbers.max() > 0.15, "the problem does not lead y off: nothing is tested"
    # The set moves once more after y was brought back, by at most 3 % of its size.
    assert followed.max() < 0.13
    assert more > few


def test_a_set_that_stays_is_left_to_chance():
    # 300 coins of 0.02, the same in both.
    assert run(aipod.Curvature(), None)[1] == run(0.1, None)[1]


@pytest.mark.parametrize("lr", [0.1, aipod.Curvature()], ids=["number", "curvature"])
def test_with_every_step_projected_nothing_is_added(lr):
    assert run(lr, moving, steps=10, prob=1.0)[1] == 50


def test_clients_leave_it_to_chance():
    """They cannot tell how far off y is without a round."""

    def loss(x, y, batch):
        return 0.5 * jnp.sum((y - x - jnp.mean(batch, axis=0)) ** 2)

    data = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4, 3)))
    within = aipod.Affine(jnp.ones((1, 3)), 1.0, moving)
    problem = federated.federate(loss, loss, data, data, batch_size=None, lower_set=within)
    start = federated.replicate(jnp.zeros(3), 6)
    made = [
        aipod.solve(
            problem, aipod.EAiPOD(upper_lr=0.1, lower_lr=lr), start, start, 30, key=KEY
        ).ledger.lower_projections
        for lr in (0.1, aipod.Curvature())
    ]
    assert made[0] == made[1]
