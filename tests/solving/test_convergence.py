"""What a solution says about its own convergence, held against closed forms and exact values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod.algorithms._watch import block_ends
from aipod.solving import convergence_of
from tests.problems import quadratic, synthetic

KEY = jax.random.key(5)
CURVATURES = np.array([0.2, 0.5, 1.0])
# |grad F| must fall to a hundredth; right to a factor of 4 in its square.
WANTED, MARGIN = 1e-4, 4.0


def bowl(noise=None, *, curvatures=CURVATURES):
    """F = 1/2 x' H x, where y* = x is found in one step; noise in f alone."""

    def upper(x, y, batch):
        return 0.5 * jnp.sum(curvatures * y**2) + (0.0 if batch is None else batch(x, y))

    return aipod.Bilevel(
        upper,
        lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
        upper_samples=None if noise is None else aipod.Noise(noise),
    )


def solver(upper_lr=0.1, **options):
    return aipod.AiPOD(
        upper_lr=upper_lr, lower_lr=1.0, lower_steps=1, adjoint_lr=1.0, adjoint_steps=2, **options
    )


def many(problem, method, steps, keys=60):
    """States after so many steps, for many keys at once."""
    start = jnp.ones(3)
    state = method.init(problem, start, start)

    def run(key):
        def body(_, state):
            return method.traced_step(problem, state, key)

        return jax.lax.fori_loop(0, steps, body, state)

    return jax.jit(jax.vmap(run))(jax.random.split(KEY, keys))


def statements(states, method):
    count = states.step.shape[0]
    return [
        convergence_of(method, jax.tree.map(lambda leaf, i=i: leaf[i], states))
        for i in range(count)
    ]


def test_the_estimate_of_a_descent_and_its_standard_error():
    """|grad F|^2 of the window, to the error of 60 keys; the errors vary as much as they say."""
    method, noise, steps = solver(upper_lr=0.01), 0.05, 60
    found = statements(many(bowl(noise), method, steps), method)
    value = np.array([f.stationarity for f in found])
    error = np.array([f.standard_error for f in found])
    # Without noise: the last two windows, which are steps 48 to 60.
    decay = (1 - 0.01 * CURVATURES) ** (2 * np.arange(48, 60)[:, None])
    exact = (decay * CURVATURES**2).sum(1)
    assert exact[-1] < value.mean() + 4 * value.std() / np.sqrt(60)
    assert value.mean() - 4 * value.std() / np.sqrt(60) < exact[0]
    assert 0.5 < value.std() / error.mean() < 2.0
    assert all(f.converged is not True for f in found)


@pytest.mark.parametrize("optimizer", [None, optax.adam(0.02, b1=0.5)])
def test_a_ball_of_noise_is_seen_whatever_the_optimiser(optimizer):
    """With SGD E |grad F|^2 = sum of alpha H s^2 / (2 - alpha H), s^2 the variance of h."""
    noise, lr = 0.1, 0.3
    method = solver(lr) if optimizer is None else solver(None, upper_optimizer=optimizer)
    states = many(bowl(noise), method, 1500)
    values = np.array([f.stationarity for f in statements(states, method)])
    exact = np.mean(np.sum((CURVATURES * np.asarray(states.x)) ** 2, axis=1))
    if optimizer is None:
        level = np.sum(lr * CURVATURES * 2 * noise**2 / (2 - lr * CURVATURES))
        assert exact == pytest.approx(level, rel=0.4)
        exact = level
    assert exact / 3 < values.mean() < 3 * exact


def test_without_noise_the_last_hypergradient_counts():
    problem, start = bowl(), jnp.ones(3)
    found = aipod.solve(problem, solver(), start, start, 50, key=KEY)
    before = aipod.solve(problem, solver(), start, start, 49, key=KEY)
    exact = float(aipod.stationarity(problem, before.x, before.y))
    assert found.convergence.stationarity == pytest.approx(exact, rel=1e-9)
    assert found.convergence.standard_error == 0


def ridge(size=None):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=8) * (np.arange(8) < 4)

    def examples():
        inputs = rng.normal(size=(60, 8))
        return inputs, inputs @ truth + 0.5 * rng.normal(size=60)

    def loss(y, batch):
        return jnp.mean((batch[0] @ y - batch[1]) ** 2)

    train, held_out = examples(), examples()
    draw = aipod.FullBatch if size is None else lambda data: aipod.Minibatches(data, size)
    return aipod.Bilevel(
        lambda x, y, batch: loss(y, batch),
        lambda x, y, batch: loss(y, batch) + jnp.mean(jnp.exp(x) * y**2),
        upper_samples=draw(held_out),
        lower_samples=draw(train),
    )


def conditioned(lowest):
    """y follows x along curvatures from `lowest` to 1."""
    rng = np.random.default_rng(1)
    goal, curvature = rng.normal(size=6), np.geomspace(lowest, 1, 6)
    return aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - goal) ** 2) + 0.05 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum(curvature * (y - x) ** 2),
    )


NOISY, FREE, QUADRATIC = synthetic(8, noise=0.05), synthetic(8), quadratic()
ZEROS = jnp.zeros(8)
SHORT = aipod.AiPOD(upper_lr=0.5, adjoint_steps=2, lower_steps=20)
SLOW = aipod.AiPOD(upper_lr=0.05, lower_lr=1e-3, adjoint_steps=50)
CASES = {
    "far": (FREE.problem, FREE.x, FREE.y, aipod.AiPOD(upper_lr=0.05), 10, {False}),
    "near": (FREE.problem, FREE.x, FREE.y, aipod.AiPOD(upper_lr=0.05), 45, {False}),
    "there": (FREE.problem, FREE.x, FREE.y, aipod.AiPOD(upper_lr=0.05), 300, {True}),
    "one projection": (FREE.problem, FREE.x, FREE.y, aipod.E3AiPOD(upper_lr=0.05), 300, {True}),
    "a ball of noise": (NOISY.problem, NOISY.x, NOISY.y, solver(0.05), 600, {False}),
    "skipping": (
        *(QUADRATIC.problem, QUADRATIC.x, QUADRATIC.y),
        aipod.E2AiPOD(upper_lr=0.05, lower_prob=0.5, adjoint_steps=40),
        *(400, {True}),
    ),
    "x off its set": (
        *(QUADRATIC.problem, QUADRATIC.x, QUADRATIC.y),
        aipod.E2AiPOD(upper_lr=0.05, lower_prob=0.5, upper_steps=3, adjoint_steps=40),
        *(400, {False}),
    ),
    "a short series": (conditioned(0.1), jnp.zeros(6), jnp.zeros(6), SHORT, 600, {False}),
    "an exact adjoint": (
        *(conditioned(0.1), jnp.zeros(6), jnp.zeros(6)),
        dataclasses.replace(SHORT, adjoint=aipod.ConjugateGradient()),
        *(600, {True}),
    ),
    "y far behind": (FREE.problem, FREE.x, FREE.y, SLOW, 200, {False}),
    "y a little behind": (FREE.problem, FREE.x, FREE.y, SLOW, 500, {None, False}),
    "y from far away": (QUADRATIC.problem, QUADRATIC.x, QUADRATIC.y + 1000, SLOW, 100, {False}),
    "a full batch": (ridge(), ZEROS, ZEROS, aipod.AiPOD(upper_lr=1.0), 30, {False}),
    "small batches": (ridge(8), ZEROS, ZEROS, aipod.AiPOD(upper_lr=0.3), 30, {False, None}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_statement_is_right_against_the_exact_stationarity(name):
    problem, x, y, method, steps, expected = CASES[name]
    solution = aipod.solve(problem, method, x, y, steps, key=KEY, every=steps)
    share = float(
        aipod.stationarity(problem, solution.x, jnp.zeros_like(y))
        / aipod.stationarity(problem, x, jnp.zeros_like(y))
    )
    assert solution.converged in expected, str(solution)
    if solution.converged is True:
        assert share < WANTED * MARGIN
    if solution.converged is False:
        assert share > WANTED / MARGIN
    assert (solution.convergence.advice == "") == (solution.converged is True)
    assert solution.result is aipod.Result.completed


def test_a_short_series_and_a_slow_lower_level_are_named():
    problem, x, y, method, steps, _ = CASES["a short series"]
    found = aipod.solve(problem, method, x, y, steps, key=KEY).convergence
    assert "the adjoint is off by" in found.reason
    assert "adjoint_steps=" in found.advice
    problem, x, y, method, steps, _ = CASES["y a little behind"]
    found = aipod.solve(problem, method, x, y, steps, key=KEY).convergence
    assert "y has not settled" in found.reason
    assert "lower_steps" in found.advice


@pytest.mark.parametrize("noise", [None, 0.1])
def test_a_start_at_the_solution_is_not_called_unconverged(noise):
    zero = jnp.zeros(3)
    found = aipod.solve(bowl(noise), solver(), zero, zero, 200, key=KEY)
    assert found.converged is (True if noise is None else None)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_units_do_not_matter(scale):
    """f times s and steps on x divided by s: the same run, and the same words."""
    problem, start = bowl(0.05), jnp.ones(3)
    scaled = dataclasses.replace(problem, upper=lambda x, y, b: scale * problem.upper(x, y, b))
    one = aipod.solve(problem, solver(0.1), start, start, 200, key=KEY).convergence
    other = aipod.solve(scaled, solver(0.1 / scale), start, start, 200, key=KEY).convergence
    assert (other.converged, other.reason) == (one.converged, one.reason)
    assert other.stationarity == pytest.approx(scale**2 * one.stationarity, rel=1e-6)
    assert other.trend == pytest.approx(one.trend, rel=1e-6)


def test_a_linear_lower_level_gets_a_word():
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x**2) + jnp.sum(jnp.sin(y)), lambda x, y, _: jnp.sum(x * y)
    )
    found = aipod.solve(problem, aipod.AiPOD(upper_lr=0.01), jnp.ones(2), jnp.ones(2), 50, key=KEY)
    assert found.converged is False
    assert "no curvature" in found.convergence.reason


def test_a_resumed_run_says_the_same(tmp_path):
    case, method = synthetic(8, noise=0.1), aipod.EAiPOD(upper_lr=0.02, lower_prob=0.4)

    def solve(steps, **options):
        return aipod.solve(case.problem, method, case.x, case.y, steps, key=KEY, **options)

    solve(73, checkpoint=tmp_path)
    resumed = solve(160, checkpoint=tmp_path, resume=True)
    assert resumed.convergence == solve(160).convergence
    assert resumed.convergence.stationarity is not None


def test_the_table():
    case = synthetic(8)
    found = aipod.solve(case.problem, aipod.AiPOD(upper_lr=0.05), case.x, case.y, 10, key=KEY)
    lines = dict(line.split(maxsplit=1) for line in str(found).splitlines())
    assert lines["result"].startswith("All outer steps were made.")
    assert lines["converged"].startswith("no: |grad F| is 0.")
    assert lines["advice"].startswith("make more outer steps")
    assert float(lines["stationarity"].split()[0]) == pytest.approx(
        found.convergence.stationarity, rel=1e-2
    )
    assert lines["projections"].startswith(f"{found.ledger.projections:,}")
    assert "rounds" not in lines
    assert "off the lower set by" in lines["feasibility"]
    assert "\n" not in repr(found)


class Silent(aipod.AbstractUpper):
    lr: float = 0.1

    def update(self, turn, z, implicit, batch, state):
        x = turn.x - turn.lr(self.lr) * turn.direction(implicit, batch)
        return x, state, turn.upper_cost(1)


def test_a_slot_that_shows_nothing_is_not_measured():
    method = dataclasses.replace(solver(), upper=Silent())
    found = aipod.solve(bowl(), method, jnp.ones(3), jnp.ones(3), 20, key=KEY)
    assert found.converged is None
    assert "not measured" in str(found)
    stop = aipod.Stop(patience=5)
    with pytest.raises(ValueError, match="Silent does not"):
        aipod.solve(bowl(), method, jnp.ones(3), jnp.ones(3), 20, key=KEY, stop=stop)


def test_a_lower_level_that_has_become_too_steep_is_no_success():
    """x runs to where the curvature is e^40 times what it was, and y cannot move any more."""
    problem = aipod.Bilevel(
        upper=lambda x, y, _: 0.5 * jnp.sum((x - 40) ** 2) + 1e-3 * jnp.sum(y**2),
        lower=lambda x, y, _: 0.5 * jnp.exp(x[0]) * y[0] ** 2 + 0.5 * (y[1] - 1) ** 2,
    )
    found = aipod.solve(
        problem,
        aipod.AiPOD(upper_lr=0.1),
        jnp.zeros(1),
        jnp.zeros(2),
        400,
        key=jax.random.key(0),
    )
    assert found.converged is False
    assert "y can hardly move" in found.convergence.reason


@pytest.mark.parametrize("method", [aipod.AiPOD, aipod.EAiPOD, aipod.E2AiPOD, aipod.E3AiPOD])
def test_a_direction_that_is_slower_than_the_run_is_not_called_converged(method):
    """y and z have hardly begun to move along it, and so the hypergradient there looks small."""
    bends = jnp.array([1e-7, 1.0])
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - 1) ** 2),
        lambda x, y, _: 0.5 * jnp.sum(bends * (y - x) ** 2),
    )
    solution = aipod.solve(problem, method(upper_lr=0.3), jnp.zeros(2), jnp.zeros(2), 300, key=KEY)
    # F = |x - 1|^2 / 2, and the first entry of x is still at 0.
    assert aipod.stationarity(problem, solution.x, jnp.zeros(2)) > 0.9
    assert solution.convergence.converged is not True
    assert solution.convergence.advice


def test_windows_and_blocks_end_when_they_should():
    """A window from step b has max(8, b // 10) steps, a block an eighth of them."""
    began = block = 0
    closed = []
    for step in range(3000):
        length = max(8, began // 10)
        wanted = step + 1 - began >= length, step + 1 - block >= length // 8
        ends, closes = block_ends(*(np.int32(n) for n in (began, block, step)))
        assert (bool(ends), bool(closes)) == (any(wanted), wanted[0])
        if ends:
            block = step + 1
        if closes:
            began = step + 1
            closed.append(began)
    assert closed[:3] == [8, 16, 24]
    assert closed[-1] - closed[-2] == closed[-2] // 10
