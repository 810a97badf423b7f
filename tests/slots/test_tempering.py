"""Shorter steps on y in noise, in the lower levels of AiPOD and its variants."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.problem import Minibatches
from aipod.solving._convergence import _lag

KEY = jax.random.key(0)
MAKE = {
    "AiPOD": aipod.AiPOD,
    "AiPOD, S = 1": lambda **options: aipod.AiPOD(lower_steps=1, **options),
    "E-AiPOD": aipod.EAiPOD,
    "E2-AiPOD": lambda **options: aipod.E2AiPOD(lower_steps=2, lower_prob=0.2, **options),
}
# x stands still, or is moved by hand.
STILL = {"upper_lr": 1e-30}


def problem_of(lower_set=None, samples=None, size=30):
    """g = 1/2 |y - x|^2, with noise where there are samples."""

    def lower(x, y, batch):
        noise = 0.0 if batch is None else batch(x, y)
        return 0.5 * jnp.sum((y - x) ** 2) + noise

    chosen = aipod.Free() if lower_set is None else lower_set
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum(y**2), lower, lower_set=chosen, lower_samples=samples
    )
    return problem, jnp.zeros(size), jnp.ones(size)


def after(solver, problem, x, y, steps, moved=lambda x, step: x):
    """The state after so many outer steps, before each of which x is moved by hand."""

    def body(state, _):
        state = dataclasses.replace(state, x=moved(state.x, state.step))
        state = solver.traced_step(problem, state, KEY)
        return state, jnp.sum((state.y - state.x) ** 2)

    run = jax.jit(lambda state: jax.lax.scan(body, state, None, length=steps))
    return run(solver.init(problem, x, y))


@pytest.mark.parametrize("name", MAKE)
def test_noise_shortens_the_steps(name):
    problem, x, y = problem_of(aipod.Affine(np.eye(30)[:5]), aipod.Noise(0.1))
    solver = MAKE[name](**STILL)
    state, gaps = after(solver, problem, x, y, 500)
    # As far as they may in outer step 500.
    least = 2 / np.sqrt(1 + 499)
    assert least - 1e-6 <= float(state.lower.tempering.share) < 1.2 * least
    plain = MAKE[name](lower_lr=aipod.Curvature(tempered=False), **STILL)
    state, longer = after(plain, problem, x, y, 500)
    assert state.lower.tempering is None
    # A step of 1 leaves all of the noise, one of 1/10 a nineteenth; skipped projections leave more.
    ratio = jnp.mean(longer[-200:]) / jnp.mean(gaps[-200:])
    assert 8 < float(ratio) < 25


def test_where_batches_are_uneven_steps_fade_later():
    """One batch in twenty bends 16 times as much; whole steps are short for the others already."""

    def lower(x, y, batch):
        bend, noise = batch
        return 0.5 * bend * jnp.sum((y - x - noise) ** 2)

    def samples(key):
        first, second = jax.random.split(key)
        stiff = jax.random.bernoulli(first, 0.05)
        return jnp.where(stiff, 16.0, 1.0), 0.1 * jax.random.normal(second, (30,))

    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    problem = dataclasses.replace(problem, lower=lower, lower_samples=samples)
    state, _ = after(MAKE["AiPOD"](**STILL), problem, x, y, 800)
    uneven = float(state.curvature.uneven())
    # About 16 over the mean curvature of 1.75; 0.99^20 is forgotten between stiff batches.
    assert 4 < uneven < 16
    least = uneven / np.sqrt(800)
    assert 0.7 * least < float(state.lower.tempering.share) < 1.4 * least


@pytest.mark.parametrize("clients", [1, 5])
def test_e3_averages_over_outer_steps_too(clients):
    """Where x has a step size; an x that finds its own pace is not kept waiting."""
    data = np.random.default_rng(0).normal(size=(clients, 400, 30))
    data -= data.mean((0, 1))

    def lower(x, y, batch):
        return 0.5 * jnp.mean(jnp.sum(((y - x)[None] - 0.1 * batch) ** 2, axis=-1))

    problem = federated.federate(
        lambda x, y, batch: 0.5 * jnp.sum(y**2), lower, data, data, batch_size=1
    )
    start = [federated.replicate(one, clients) for one in (jnp.zeros(30), jnp.ones(30))]
    if clients == 1:
        samples = Minibatches(data[0], 1)
        problem = aipod.Bilevel(lambda x, y, _: 0.5 * jnp.sum(y**2), lower, lower_samples=samples)
        start = [one[0] for one in start]
    still = {"moved": lambda x, step: jnp.zeros_like(x)}
    fading, gaps = after(aipod.E3AiPOD(**STILL), problem, *start, 800, **still)
    least = 2 / np.sqrt(800)
    assert least - 1e-6 <= float(fading.lower.tempering.share) < 1.2 * least
    paced, longer = after(aipod.E3AiPOD(), problem, *start, 800, **still)
    assert float(paced.lower.tempering.share) == 1.0
    shares = [float(aipod.E3AiPOD().lower.share(state.lower)) for state in (fading, paced)]
    gain = float(jnp.mean(longer[-200:]) / jnp.mean(gaps[-200:]))
    # Measured: 1/8 of the step and 20 times less noise; between clients 1/2 and 2.4 times.
    assert 0.5 * least < shares[0] / shares[1] < (2 * least if clients == 1 else 0.7)
    assert gain > (8 if clients == 1 else 1.6)


def test_e3_without_noise_takes_whole_steps():
    problem, x, y = problem_of(aipod.Affine(np.eye(30)[:5]))
    state, _ = after(
        aipod.E3AiPOD(**STILL),
        problem,
        x,
        y,
        200,
        lambda x, step: jnp.ones_like(x) * (-1.0) ** step,
    )
    assert float(aipod.E3AiPOD().lower.share(state.lower)) == 1.0


def test_a_far_start_does_not_hide_the_noise():
    """y is there after a few steps; how far it came must not count for a hundred."""
    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    shares = []
    for factor in (0.0, 1e3):
        state, _ = after(MAKE["AiPOD"](**STILL), problem, x, factor * y, 60)
        shares.append(float(state.lower.tempering.share))
    assert max(shares) < 0.35


@pytest.mark.parametrize("name", ["AiPOD", "E-AiPOD"])
def test_an_x_that_finds_its_own_pace_is_not_kept_waiting(name):
    """It slows down where y is behind."""
    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    state, _ = after(MAKE[name](), problem, x, y, 400, lambda x, step: jnp.zeros_like(x))
    assert float(state.lower.tempering.share) == 0.5


@pytest.mark.parametrize("name", ["AiPOD", "E-AiPOD"])
def test_without_noise_the_step_stays_whole(name):
    """Also where x goes to and fro, and y after it."""
    problem, x, y = problem_of(aipod.Affine(np.eye(30)[:5]))
    ends = []
    for tempered in (True, False):
        solver = MAKE[name](lower_lr=aipod.Curvature(0.3, tempered=tempered), **STILL)
        state, _ = after(
            solver, problem, x, y, 200, lambda x, step: jnp.ones_like(x) * (-1.0) ** step
        )
        ends.append(state)
    assert float(ends[0].lower.tempering.share) == 1.0
    np.testing.assert_array_equal(ends[0].y, ends[1].y)


def test_y_that_has_to_follow_x_takes_whole_steps():
    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    solver = aipod.AiPOD(lower_lr=aipod.Curvature(safety=0.05), **STILL)
    calm, _ = after(solver, problem, x, y, 500)
    assert float(calm.lower.tempering.share) < 0.5
    # From there on x runs.
    run = jax.jit(lambda s: solver.traced_step(problem, dataclasses.replace(s, x=s.x + 0.03), KEY))
    for _ in range(120):
        calm = run(calm)
    assert float(calm.lower.tempering.share) == 1.0


def test_noise_off_the_set_shortens_nothing():
    """Projections undo it, however short the steps are."""
    rows = np.eye(30)[:29]
    problem, x, y = problem_of(aipod.Affine(rows), aipod.Noise(0.1))

    def lower(x, y, batch):
        return 0.5 * jnp.sum((y - x) ** 2) + batch(x, y.at[29].set(0.0))

    problem = dataclasses.replace(problem, lower=lower)
    state, _ = after(aipod.EAiPOD(**STILL), problem, x, y, 300)
    assert float(state.lower.tempering.share) == 1.0


@pytest.mark.parametrize("name", ["AiPOD", "E-AiPOD"])
def test_the_statement_knows_that_short_steps_follow_x_less_quickly(name):
    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    solver = MAKE[name](**STILL)
    state = solver.init(problem, x, y)
    short = eqx.tree_at(lambda s: s.lower.tempering.share, state, jnp.asarray(0.1))
    assert _lag(solver, short, 0.5) == pytest.approx(10 * _lag(solver, state, 0.5))


@pytest.mark.parametrize("name", ["AiPOD", "E-AiPOD"])
def test_clients_know_alike_how_far_to_shorten(name, tmp_path):
    """What is kept has no client axis: in partial rounds too, nothing has to be sent for it."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(4, 50, 6))

    def loss(x, y, batch):
        return 0.5 * jnp.mean(jnp.sum((batch - (x + y)[None]) ** 2, axis=-1))

    problem = federated.federate(loss, loss, data, data, batch_size=1, participation=0.5)
    x, y = (federated.replicate(jnp.zeros(6), 4) for _ in range(2))
    solver = MAKE[name](upper_lr=1e-30)
    solution = aipod.solve(problem, solver, x, y, 400, key=KEY)
    found = solution.state.lower.tempering
    assert float(found.share) < 0.5
    assert found.mean.shape == (6,)
    if name == "E-AiPOD":
        assert found.last.shape == (6,)
    kept = {"key": KEY, "checkpoint": tmp_path / "run.npz"}
    aipod.solve(problem, solver, x, y, 150, **kept)
    again = aipod.solve(problem, solver, x, y, 400, resume=True, **kept)
    np.testing.assert_array_equal(again.state.lower.tempering.mean, found.mean)


def test_a_number_is_taken_as_it_is():
    problem, x, y = problem_of(samples=aipod.Noise(0.1))
    for name in ("AiPOD", "E-AiPOD"):
        state = MAKE[name](lower_lr=0.5, **STILL).init(problem, x, y)
        assert state.lower.tempering is None
