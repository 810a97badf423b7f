"""How `Curvature` looks: in which loops, at which batches, and how far ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.stepsize._curvature import _COLD_ITERATIONS, _FIRST_BATCHES

KEY = jax.random.key(0)
SIZE = 10


def inputs_of(clients):
    """With Hessians whose largest eigenvalues are 3 % apart."""
    rng = np.random.default_rng(0)
    scales = 0.97 ** (np.arange(SIZE) / 2)
    return np.stack(
        [np.linalg.qr(rng.normal(size=(12, 12)))[0][:, :SIZE] * scales for _ in range(clients)]
    )


def ridge(clients=3):
    data = inputs_of(clients), np.random.default_rng(1).normal(size=(clients, 12))

    def lower(x, y, batch):
        inputs, targets = batch
        return 0.5 * jnp.sum((inputs @ y - targets) ** 2) + 5e-4 * jnp.sum(jnp.exp(x) * y**2)

    def upper(x, y, batch):
        return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)

    problem = federated.federate(upper, lower, data, data, batch_size=None)
    return problem, *(federated.replicate(jnp.zeros(SIZE), clients) for _ in range(2))


@pytest.mark.parametrize("make", [aipod.AiPOD, aipod.EAiPOD, aipod.E2AiPOD, aipod.E3AiPOD])
def test_few_loops_have_a_length_that_depends_on_the_run(make):
    """The looks at the curvature, the search ahead of y, and the windows of the watch."""
    problem, x, y = ridge()
    solver = make()
    state = solver.init(problem, x, y)
    step = jax.jit(lambda state: solver.traced_step(problem, state, KEY))
    text = step.lower(state).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    watched = [line for line in loops if "known_trip_count" not in line]
    assert len(watched) < len(loops)
    assert len(watched) <= 3


@pytest.mark.parametrize("iterations", [1, 2, 4, 7])
@pytest.mark.parametrize("clients", [1, 3])
def test_the_first_estimate_is_that_of_many_iterations(clients, iterations):
    """As good as an eigenvalue of the Hessian allows, however many iterations a step has."""
    problem, x, y = ridge(clients)
    inputs = inputs_of(clients)
    hessians = np.einsum("mni,mnj->mij", inputs, inputs) + 1e-3 * np.eye(SIZE)
    largest = np.linalg.eigvalsh(hessians).max()
    lr = aipod.Curvature(iterations=iterations)
    solver = aipod.E3AiPOD(lower_lr=lr, adjoint_lr=lr)
    state = solver.step(problem, solver.init(problem, x, y), key=KEY)
    assert 0.98 * largest < float(state.curvature.estimate) <= largest * (1 + 1e-9)


def test_the_first_step_looks_at_eight_batches_and_at_the_first_one_longest():
    """The ledger counts each of them once."""
    seen = []

    def samples(key):
        jax.debug.callback(
            lambda words: seen.append(tuple(map(int, words))), jax.random.key_data(key)
        )
        return jax.random.normal(key, (4,))

    def lower(x, y, batch):
        return 0.5 * jnp.sum((y - x - batch) ** 2)

    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(y**2), lower, lower_samples=samples)
    lr = aipod.Curvature(iterations=3)
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=lr, adjoint_lr=lr, lower_steps=1)
    fixed = aipod.AiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, lower_steps=1)
    draws = {}
    for name, one in (("curvature", solver), ("fixed", fixed)):
        seen.clear()
        state = one.step(problem, one.init(problem, jnp.ones(4), jnp.zeros(4)), key=KEY)
        jax.effects_barrier()
        draws[name] = {words: seen.count(words) for words in seen}, int(state.counts.lower_samples)
    own = {words: n for words, n in draws["curvature"][0].items() if words not in draws["fixed"][0]}
    assert sorted(own.values()) == [1] * (_FIRST_BATCHES - 1) + [1 + _COLD_ITERATIONS // 3]
    assert draws["curvature"][1] - draws["fixed"][1] == _FIRST_BATCHES


def test_an_estimate_that_is_too_low_at_first_does_not_look_too_far():
    """A step of 1 / l ends before the wall; that of an estimate of 0.8 l meets it."""
    rng = np.random.default_rng(1)
    turned = jnp.asarray(np.linalg.qr(rng.normal(size=(40, 40)))[0])
    scales = jnp.linspace(0.5, 1.0, 40)

    def lower(x, y, batch):
        along = turned @ (y - x)
        wall = jnp.sum(jnp.maximum(-0.15 - along, 0.0) ** 2)
        return 0.5 * jnp.sum(scales * along**2) + 1e3 * wall

    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(y**2), lower)
    lr = aipod.Curvature(iterations=1)
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=lr, adjoint_lr=lr)
    start = turned.T @ jnp.ones(40)
    state = solver.step(problem, solver.init(problem, jnp.zeros(40), start), key=KEY)
    assert float(state.curvature.estimate) < 1.1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [aipod.AiPOD, aipod.E3AiPOD])
def test_rounding_errors_at_a_solution_are_no_curvature(make, dtype):
    """There the slope, and how it changes along a step, are nothing else."""
    rng, size = np.random.default_rng(0), 30
    turned = np.linalg.qr(rng.normal(size=(size, size)))[0]
    hessian = jnp.asarray(turned @ np.diag(np.linspace(0.3, 2, size)) @ turned.T, dtype)
    goal = jnp.asarray(rng.normal(size=size), dtype)
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - 1) ** 2) + 0.05 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * y @ hessian @ y - jnp.sum((goal + x) * y),
    )
    solver, start = make(upper_lr=0.05), jnp.zeros(size, dtype)

    def body(state, _):
        state = solver.traced_step(problem, state, jax.random.key(0))
        return state, state.curvature.estimate

    run = jax.jit(lambda state: jax.lax.scan(body, state, None, length=3000)[1])
    # Without a bound on the length of the steps that tell: 1.08 to 1.21.
    assert float(run(solver.init(problem, start, start)).max()) < 2 * (1 + 1e-5)


def test_a_part_in_small_units_is_looked_at_ahead_all_the_same():
    """z is near a wall, and beside y in units a million times larger its moves are rounding."""

    def lower(x, y, _):
        wall = jnp.maximum(y["small"] - 1e-3, 0.0) ** 2
        flat = 0.5 * jnp.sum((y["large"] - 1e6) ** 2)
        return flat + 0.5 * jnp.sum((y["small"] - 2e-3) ** 2 + 1e4 * wall)

    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(x**2), lower)
    solver = aipod.AiPOD(upper_lr=0.1)
    y = {"large": jnp.full(3, 1e6, jnp.float32), "small": jnp.zeros(2, jnp.float32)}
    state = solver.init(problem, jnp.zeros(1, jnp.float32), y)
    state = solver.step(problem, state, key=jax.random.key(0))
    assert float(state.curvature.estimate) > 2
