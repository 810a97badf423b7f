"""Finite sums to the last digit: with constraints, skipped projections, clients; and refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.algorithms._estimates import estimation_of
from aipod.federated import federate, replicate

KEY = jax.random.key(0)


def _constrained(batch=16, epochs=True):
    """Affine constraints of deficient rank at both levels, a coupling among them."""
    rng = np.random.default_rng(0)
    n, dx, dy = 72, 5, 6
    q, c, t = rng.normal(size=(n, dy)), rng.normal(size=(n, dx)), rng.normal(size=n)
    p, s = rng.normal(size=(n, dy)), rng.normal(size=n)
    a = rng.normal(size=(2, dy))
    b = rng.normal(size=(1, dx))
    a, b = np.vstack([a, a[:1] - a[1:]]), np.vstack([b, 2 * b])
    h = np.vstack([0.3 * rng.normal(size=(2, dx)), np.zeros((1, dx))])
    h[2] = h[0] - h[1]

    def lower(x, y, batch):
        q, c, t = batch
        return 0.5 * jnp.mean((q @ y - c @ x - t) ** 2) + 0.2 * jnp.sum(y**2)

    def upper(x, y, batch):
        p, s = batch
        return 0.5 * jnp.mean((p @ y - s) ** 2) + 0.3 * jnp.sum((x - 1) ** 2)

    return aipod.Bilevel(
        upper,
        lower,
        aipod.Affine(b, b @ np.ones(dx)),
        aipod.Affine(a, a @ np.ones(dy), coupling=lambda x: jnp.asarray(h) @ x),
        aipod.Minibatches((p, s), batch, epochs=epochs),
        aipod.Minibatches((q, c, t), batch, epochs=epochs),
    )


def _stationary(problem, solver, x, y, steps, **more):
    solution = aipod.solve(problem, solver, x, y, steps=steps, key=KEY, **more)
    return float(aipod.stationarity(problem, solution.x, y)), solution


@pytest.mark.parametrize(
    ("epochs", "estimator"), [(True, aipod.SAGA()), (False, aipod.SARAH())], ids=["saga", "sarah"]
)
def test_e_aipod_converges_to_the_solution_with_skipped_projections(epochs, estimator):
    """72 examples in batches of 16: the last one is smaller."""
    problem = _constrained(epochs=epochs)
    rates = {"upper_lr": 0.3, "lower_lr": 0.06, "adjoint_lr": 0.06, "lower_prob": 0.2}
    x, y = jnp.zeros(5), jnp.zeros(6)
    solver = aipod.EAiPOD(**rates, estimator=estimator)
    found, solution = _stationary(problem, solver, x, y, 700)
    assert found < 1e-12
    ledger = solution.ledger
    assert ledger.lower_projections < 0.3 * 5 * 700
    if epochs:
        plain, _ = _stationary(problem, aipod.EAiPOD(**rates), x, y, 700)
        assert plain > 1e-7


def _federation(**more):
    rng = np.random.default_rng(1)

    def client(m, count):
        inputs = rng.normal(size=(count, 4)) * (1 + 0.1 * m)
        return inputs, inputs @ (rng.normal(size=4) + 0.3 * m) + 0.5 * rng.normal(size=count)

    def loss(x, y, batch):
        return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)

    train = [client(m, count) for m, count in enumerate([24, 9, 16, 5, 24, 20, 11, 1])]
    valid = [client(m, 12) for m in range(8)]
    return federate(
        lambda x, y, b: loss(x, y, b) + 0.1 * jnp.sum(x**2),
        lambda x, y, b: loss(x, y, b) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        valid,
        train,
        batch_size=8,
        epochs=True,
        **more,
    )


RATES = {"upper_lr": 0.2, "lower_lr": 0.05, "adjoint_lr": 0.05}


def test_unlike_clients_of_unequal_sizes_agree_on_the_solution(tmp_path):
    """And a run resumed in the middle of an epoch is the run."""
    problem, points = _federation(), [replicate(jnp.zeros(4), 8)] * 2
    solver = aipod.VRAiPOD(**RATES, lower_steps=4)
    found, whole = _stationary(problem, solver, *points, 900)
    assert found < 1e-12
    path = tmp_path / "run"
    aipod.solve(problem, solver, *points, steps=501, key=KEY, checkpoint=path)
    part = aipod.solve(problem, solver, *points, steps=900, key=KEY, checkpoint=path, resume=True)
    np.testing.assert_array_equal(part.x, whole.x)
    # An estimate of G u may bend down where the lower level is convex: no damping comes of it.
    assert float(whole.state.adjoint.damping) == 0
    # Counted by each client, whose batches number 1 to 3.
    assert whole.state.estimates[0]["gradient"].count.tolist() == [4 * 900] * 8


def test_in_a_cohort_absent_clients_draw_nothing():
    problem, points = _federation(participation=0.5), [replicate(jnp.zeros(4), 8)] * 2
    solver = aipod.VRAiPOD(**RATES)
    solution = aipod.solve(problem, solver, *points, steps=20, key=KEY)
    counts = np.asarray(solution.state.estimates[0]["gradient"].count)
    assert counts.sum() == 4 * 2 * 20
    assert counts.min() < counts.max()
    tables = np.asarray(solution.state.estimates[0]["gradient"].own.rows)
    assert np.isfinite(tables).all()


def test_fedbioacc_goes_below_the_noise_of_plain_steps():
    """With one local step STORM's own weight a sets the noise that is left."""
    problem, points = _federation(), [replicate(jnp.zeros(4), 8)] * 2
    found = [
        _stationary(problem, aipod.FedBiOAcc(**RATES, local_steps=1, momentum=a), *points, 600)[0]
        for a in (1.0, 0.02)
    ]
    assert found[1] < 0.2 * found[0]


def test_what_estimators_refuse():
    problem = _constrained()
    stream = aipod.Bilevel(
        problem.upper,
        problem.lower,
        upper_samples=lambda key: problem.upper_samples(key),
        lower_samples=problem.lower_samples,
    )
    x, y = jnp.zeros(5), jnp.zeros(6)
    with pytest.raises(ValueError, match=r"SAGA needs a finite sum.*aipod\.STORM"):
        aipod.SABA(**RATES).init(stream, x, y)
    with pytest.raises(ValueError, match="estimator goes with batch=1"):
        aipod.Alternating(
            aipod.ProjectedSGD(), aipod.Zero(), aipod.EveryStep(lr=1.0), None, 2, aipod.SAGA()
        )
    with pytest.raises(ValueError, match=r"estimator must be an estimator.*got str"):
        aipod.E3AiPOD(estimator="saga")
    solver = aipod.EAiPOD(**RATES, adjoint_steps=5, estimator=aipod.SAGA())
    with pytest.raises(ValueError, match="Neumann takes no estimator here"):
        solver.step(problem, solver.init(problem, x, y), key=KEY)
    with pytest.raises(ValueError, match="SABA takes no constraint"):
        aipod.SABA(**RATES).init(problem, x, y)


@pytest.mark.parametrize(
    "solver", [aipod.MASOBA, aipod.FSLA, aipod.SUSTAIN, aipod.VRBO, aipod.SVRB]
)
def test_the_rivals_run_in_single_precision(solver):
    rng = np.random.default_rng(4)
    data = tuple(rng.normal(size=(20, 3)).astype(np.float32) for _ in range(2))
    problem = aipod.Bilevel(
        lambda x, y, b: jnp.mean((b[0] @ y - b[1] @ x) ** 2) + jnp.sum(x**2),
        lambda x, y, b: jnp.mean((b[0] @ y - b[1] @ x - 1) ** 2) + jnp.sum(y**2),
        upper_samples=aipod.Minibatches(data, 8, epochs=True),
        lower_samples=aipod.Minibatches(data, 8, epochs=True),
    )
    made = solver(upper_lr=0.02, lower_lr=0.05, adjoint_lr=0.05)
    x, y = jnp.ones(3, jnp.float32), jnp.zeros(3, jnp.float32)
    solution = aipod.solve(problem, made, x, y, steps=300, key=KEY)
    assert solution.x.dtype == jnp.float32
    before = float(aipod.stationarity(problem, x, y))
    assert float(aipod.stationarity(problem, solution.x, y)) < 0.02 * before


def _small_sums():
    rng = np.random.default_rng(0)
    data = aipod.Minibatches(jnp.asarray(rng.normal(size=(12, 2))), 4, epochs=True)

    def loss(x, y, batch):
        return jnp.mean((batch @ y - x[0]) ** 2) + jnp.sum(y**2)

    return aipod.Bilevel(loss, loss, upper_samples=data, lower_samples=data)


def test_slots_that_share_draws_read_one_counter():
    """Else a program finds the same minibatch, and what its derivatives share, once for each."""
    problem = _small_sums()

    def read(solver, steps):
        state = solver.init(problem, jnp.zeros(2), jnp.zeros(2))
        for _ in range(steps):
            state = solver.step(problem, state, key=KEY)
        each = estimation_of(solver, state.estimates, KEY, None)
        slots = each.lower, each.adjoint, each.upper
        return [{name: kept.count for name, kept in slot.memory.items()} for slot in slots]

    rates = {"upper_lr": 0.1, "lower_lr": 0.1, "adjoint_lr": 0.1}
    lower, adjoint, upper = read(aipod.SABA(**rates), 3)
    assert lower["gradient"] is adjoint["product"] is upper["implicit"]
    assert adjoint["slope"] is upper["direct"]
    assert int(upper["direct"]) == int(upper["implicit"]) == 3
    # Two steps on y and on x draw more often than one on the adjoint.
    lower, adjoint, upper = read(aipod.VRAiPOD(**rates, upper_steps=2), 3)
    assert adjoint["product"] is upper["implicit"]
    assert (int(lower["gradient"]), int(upper["implicit"]), int(upper["direct"])) == (6, 3, 6)


def test_a_step_on_shared_draws_is_one_straight_program():
    """Each of these would cost a small step more than its derivatives do."""
    problem = _small_sums()
    solver = aipod.SOBA(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, shared=True)
    state = solver.init(problem, jnp.zeros(2), jnp.zeros(2))

    def loop(state):
        return jax.lax.fori_loop(0, 9, lambda _, s: solver.traced_step(problem, s, KEY), state)

    text = jax.jit(loop).lower(state).compile().as_text()
    parts = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    body = max((parts[name] for name in re.findall(r"body=%?([\w.-]+)", text)), key=len)
    # The order of an epoch and the end of a block are no conditions, which copy what they return;
    # and Threefry is for samplers that draw with replacement.
    assert "conditional(" not in body
    assert "shift-left" not in text
    # One batch of each level: no slice of the data is made twice.
    assert len(re.findall(r"^ *%?\S*dynamic-slice\S* = ", body, re.M)) == 2
