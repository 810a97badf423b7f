"""Corrections that move further than to their plain update: the relaxation of `OneRound`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated

KEY = jax.random.key(0)
CLIENTS, SIZE = 5, 4


def upper(x, y, batch):
    return 0.5 * jnp.sum((y - 1) ** 2) + 0.5 * jnp.sum(x**2)


def lower(x, y, batch):
    (scales, centres) = (part[0] for part in batch)
    return 0.5 * jnp.sum(scales * (y - x - centres) ** 2)


def unlike(**options):
    """Clients that agree on nothing: each is stiff, by factors up to 100, where others are flat."""
    rng = np.random.default_rng(3)
    scales = 10 ** rng.uniform(-2, 0, size=(CLIENTS, 1, SIZE))
    data = (scales, rng.normal(size=(CLIENTS, 1, SIZE)))
    return federated.federate(upper, lower, data, data, batch_size=None, **options), data


def run(problem, steps, **options):
    start = federated.replicate(jnp.zeros(SIZE), CLIENTS)
    solver = aipod.E3AiPOD(upper_lr=1e-12, **options)
    return aipod.solve(problem, solver, start, start, steps, key=KEY)


def test_agreement_of_unlike_clients_takes_fewer_rounds():
    problem, (scales, centres) = unlike()

    def outcome(relaxation):
        solution = run(problem, 60, relaxation=relaxation, lower_optimizer=optax.sgd(1.0))
        x, mean = np.asarray(solution.x[0]), lambda values: np.mean(values, axis=(0, 1))
        exact = x + mean(scales * centres) / mean(scales)
        return np.max(np.abs(np.asarray(solution.y) - exact)), solution.state.lower.correction

    (plain, _), (default, corrections), (given, _) = map(outcome, (1.0, None, 1.5))
    assert default < plain / 2
    assert given < plain / 2
    assert np.max(np.abs(np.sum(corrections, axis=0))) < 1e-12


@pytest.mark.parametrize("curvature", [1e-3, -0.05], ids=["flat", "bends down"])
def test_local_steps_that_go_on_and_on_leave_corrections_alone(curvature):
    """There a plain update takes away all of the error or more, and 1.5 times it would diverge."""
    rng = np.random.default_rng(4)
    # One stiff direction for all, in which nothing is left to do, decides on the step.
    scales = np.tile([1.0] + (SIZE - 1) * [curvature], (CLIENTS, 1, 1))
    centres = rng.normal(size=scales.shape)
    centres[..., 0] = 0.0
    problem = federated.federate(
        upper, lower, (scales, centres), (scales, centres), batch_size=None
    )
    plain, default, given = (run(problem, 3, relaxation=value) for value in (1.0, None, 1.5))
    corrections = [one.state.lower.correction for one in (plain, default, given)]
    np.testing.assert_array_equal(corrections[1], corrections[0])
    assert np.max(np.abs(corrections[2] - corrections[0])) > 1e-4


def test_corrections_converge_for_unlike_quadratic_clients():
    """The linear map of a round, in NumPy, has a spectral radius below 1 up to a factor of 1.9."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        clients, size, steps = rng.integers(2, 6), rng.integers(1, 4), int(rng.choice([2, 5, 20]))
        bases = np.linalg.qr(rng.normal(size=(clients, size, size)))[0]
        values = 10 ** rng.uniform(-3, 0, size=(clients, size))
        hessians = np.einsum("mij,mj,mkj->mik", bases, values, bases)
        lr = 1 / values.max()
        for factor in (1.5, 1.9):
            radius = np.max(np.abs(np.linalg.eigvals(round_of(hessians, lr, steps, factor))))
            assert radius < 1, (clients, size, steps, factor, radius)


def round_of(hessians, lr, steps, factor):
    """The matrix of a round on (y, r), for minimisers at 0, where the r add up to zero."""
    clients, size, _ = hessians.shape

    def step(point, corrections):
        ends = np.repeat(point[None], clients, axis=0)
        for _ in range(steps):
            ends = ends - lr * (np.einsum("mij,mj->mi", hessians, ends) - corrections)
        mean = np.mean(ends - lr * steps * corrections, axis=0)
        return mean, corrections + factor * (mean - ends) / (lr * steps)

    # An orthonormal basis of corrections that add up to zero.
    spread = np.linalg.svd(np.eye(clients) - 1 / clients)[0][:, :-1]
    columns = []
    for unit in np.eye(size * clients):
        point, rest = unit[:size], unit[size:].reshape(clients - 1, size)
        mean, corrections = step(point, spread @ rest)
        columns.append(np.concatenate([mean, (spread.T @ corrections).ravel()]))
    return np.stack(columns, axis=1)


def robust():
    problem, _ = unlike()
    agreement = aipod.sets.RobustConsensus(aipod.sets.TrimmedMean(0.25))
    return dataclasses.replace(problem, upper_set=agreement, lower_set=agreement)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(lambda: unlike(participation=0.6)[0], id="cohorts"),
        pytest.param(robust, id="robust averages"),
    ],
)
def test_elsewhere_corrections_move_as_in_the_equations(problem):
    """Where some are absent their r would be old, and a robust average is no mean."""
    plain, default = (run(problem(), 6, relaxation=value) for value in (1.0, None))
    for one, other in zip(
        jax.tree.leaves(plain.state), jax.tree.leaves(default.state), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_with_steps_that_are_given_it_is_scaffold():
    problem, _ = unlike()
    plain, default = (run(problem, 4, relaxation=value, lower_lr=0.1) for value in (1.0, None))
    np.testing.assert_array_equal(plain.state.lower.correction, default.state.lower.correction)


def bounded():
    start = jnp.zeros(SIZE)
    problem = aipod.Bilevel(
        upper,
        lambda x, y, batch: jnp.sum((y - x - 1) ** 2),
        lower_set=aipod.sets.Box(0.0, 1.0),
    )
    return aipod.solve(problem, aipod.E3AiPOD(relaxation=1.2), start, start, 2, key=KEY)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: aipod.E3AiPOD(relaxation=2.0), "relaxation must be above 0 and below 2, got 2.0"),
        (lambda: aipod.OneRound(relaxation=0), "relaxation must be above 0 and below 2, got 0.0"),
        (lambda: aipod.OneRound(relaxation="much"), "relaxation must be a number, got 'much'"),
        (bounded, "relaxation= is for lower levels without bounds"),
    ],
)
def test_bad_arguments_get_one_clear_sentence(act, message):
    with pytest.raises(ValueError, match=message):
        act()
