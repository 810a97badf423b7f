"""Estimators: their mean over all batches, their variance at rest, and SABA and SRBA by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.problem._pieces import in_epochs
from aipod.slots._oracles import words_of
from aipod.slots.estimators import Oracle
from aipod.stepsize import Rates

PIECES = 5


def _parts(seed=0):
    """Derivatives of five pieces, as functions of a point (x, y) of two vectors."""
    rng = np.random.default_rng(seed)
    matrices = jnp.asarray(rng.normal(size=(PIECES, 3, 4)))
    offsets = jnp.asarray(rng.normal(size=(PIECES, 3)))

    def piece(i, point):
        x, y = point
        return matrices[i] @ jnp.concatenate([x, jnp.sin(y)]) + offsets[i]

    def full(point):
        return jnp.mean(jnp.stack([piece(i, point) for i in range(PIECES)]), axis=0)

    return piece, full


def _oracle(number, draw, seed=0):
    piece, full = _parts(seed)
    return Oracle(
        drawn=lambda point: piece(number, point),
        full=full,
        number=jnp.asarray(number),
        pieces=PIECES,
        sizes=PIECES,
        before=jnp.asarray(draw),
        clock=jnp.asarray(draw),
        key=jax.random.key(draw),
        rates=Rates(jnp.asarray(draw), None),
    )


def _points(count):
    rng = np.random.default_rng(7)
    return [
        (jnp.asarray(rng.normal(size=2)), jnp.asarray(rng.normal(size=2))) for _ in range(count)
    ]


def _after(estimator, points, numbers):
    """The memory and the last estimate after some draws."""
    memory = estimator.init(jnp.zeros(3), points[0], PIECES, False)
    found = None
    for k, (point, number) in enumerate(zip(points, numbers, strict=True)):
        found = estimator.estimate(_oracle(number, k), point, memory)
        memory = found.memory
    return memory, found.value


NUMBERS = (3, 0, 4, 0, 2)


@pytest.mark.parametrize("estimator", [aipod.SAGA(), aipod.LooplessSVRG(0.3)])
def test_unbiased_over_all_batches(estimator):
    *before, last = _points(6)
    memory, _ = _after(estimator, before, NUMBERS)
    values = [estimator.estimate(_oracle(i, 5), last, memory).value for i in range(PIECES)]
    np.testing.assert_allclose(np.mean(values, axis=0), _parts()[1](last), rtol=1e-12)


@pytest.mark.parametrize("weight", [0.3, 0.7])
def test_bias_of_a_saga_that_trusts_the_table_more(weight):
    *before, last = _points(6)
    memory, _ = _after(aipod.SAGA(weight), before, NUMBERS)
    estimator, right = aipod.SAGA(weight), _parts()[1](last)
    values = [estimator.estimate(_oracle(i, 5), last, memory).value for i in range(PIECES)]
    bias = (1 - weight) * (memory.mean - right)
    np.testing.assert_allclose(np.mean(values, axis=0) - right, bias, rtol=1e-10)
    full = aipod.SAGA()
    # The table itself is that of SAGA, and the noise a share of it.
    plain = [full.estimate(_oracle(i, 5), last, memory).value for i in range(PIECES)]
    np.testing.assert_allclose(np.std(values, axis=0), weight * np.std(plain, axis=0), rtol=1e-10)


def test_saga_with_the_weight_of_one_row_is_the_mean_of_the_new_table():
    memory, value = _after(aipod.SAGA(1 / PIECES), _points(5), NUMBERS)
    np.testing.assert_allclose(value, jnp.mean(memory.rows, axis=0), rtol=1e-12)


def test_saga_refuses_weights_above_one():
    with pytest.raises(ValueError, match="at most 1"):
        aipod.SAGA(1.5)


@pytest.mark.parametrize(
    ("estimator", "kept"), [(aipod.SARAH(period=100), 1.0), (aipod.STORM(0.3), 0.7)]
)
def test_the_bias_of_recursive_estimates_is_the_error_before(estimator, kept):
    *before, last = _points(6)
    full = _parts()[1]
    memory, value = _after(estimator, before, NUMBERS)
    values = [estimator.estimate(_oracle(i, 5), last, memory).value for i in range(PIECES)]
    bias = np.mean(values, axis=0) - full(last)
    error = value - full(before[-1])
    assert np.linalg.norm(error) > 1e-3
    np.testing.assert_allclose(bias, kept * error, rtol=1e-10)


@pytest.mark.parametrize("estimator", [aipod.SARAH(period=100), aipod.STORM(0.3)])
def test_recursive_estimates_are_right_in_the_mean_over_all_histories(estimator):
    points = _points(3)
    values = [
        _after(estimator, points, numbers)[1]
        for numbers in itertools.product(range(PIECES), repeat=3)
    ]
    np.testing.assert_allclose(np.mean(values, axis=0), _parts()[1](points[-1]), rtol=1e-10)


def test_a_moving_average_lags():
    points = _points(3)
    estimator = aipod.HeavyBall(0.25)
    values = [
        _after(estimator, points, numbers)[1]
        for numbers in itertools.product(range(PIECES), repeat=3)
    ]
    full = _parts()[1]
    expected = 0.25 * full(points[2]) + 0.75 * (0.25 * full(points[1]) + 0.75 * full(points[0]))
    np.testing.assert_allclose(np.mean(values, axis=0), expected, rtol=1e-10)


@pytest.mark.parametrize("estimator", [aipod.SAGA(), aipod.LooplessSVRG(), aipod.SARAH()])
def test_the_variance_is_zero_where_the_point_rests(estimator):
    point = _points(1)[0]
    numbers = [0, 1, 2, 3, 4] * 2
    memory, _ = _after(estimator, [point] * 10, numbers)
    values = [estimator.estimate(_oracle(i, 11), point, memory).value for i in range(PIECES)]
    full = _parts()[1](point)
    np.testing.assert_allclose(values, np.broadcast_to(full, (PIECES, 3)), rtol=1e-12)
    spread = np.var([_parts()[0](i, point) for i in range(PIECES)], axis=0).sum()
    assert spread > 0.1


N, M, DX, DY, SIZE = 24, 16, 3, 4, 4


def _data():
    rng = np.random.default_rng(3)
    lower = (rng.normal(size=(N, DY)), rng.normal(size=(N, DX)), rng.normal(size=N))
    upper = (rng.normal(size=(M, DY)), rng.normal(size=(M, DX)), rng.normal(size=M))
    return lower, upper


def _lower(x, y, batch):
    q, c, t = batch
    return 0.5 * jnp.mean((q @ y - c @ x - t) ** 2) + 0.1 * jnp.sum(y**2)


def _upper(x, y, batch):
    p, r, s = batch
    return 0.5 * jnp.mean((p @ y + r @ x - s) ** 2) + 0.1 * jnp.sum(x**2)


def _problem(epochs=True, size=SIZE):
    lower, upper = _data()
    return aipod.Bilevel(
        _upper,
        _lower,
        upper_samples=aipod.Minibatches(upper, size, epochs=epochs),
        lower_samples=aipod.Minibatches(lower, size, epochs=epochs),
    )


def _derivatives(problem):
    """D_y, G z, grad_y f, cross z and grad_x f of examples, in NumPy."""
    lower = [np.asarray(leaf) for leaf in problem.lower_samples.data]
    upper = [np.asarray(leaf) for leaf in problem.upper_samples.data]

    def of(x, y, z, i, j):
        q, c, t = (leaf[i] for leaf in lower)
        p, r, s = (leaf[j] for leaf in upper)
        residual, error = q @ y - c @ x - t, p @ y + r @ x - s
        return [
            q.T @ residual / len(q) + 0.2 * y,
            q.T @ (q @ z) / len(q) + 0.2 * z,
            p.T @ error / len(p),
            c.T @ (q @ z) / len(q),
            r.T @ error / len(p) + 0.2 * x,
        ]

    return of


def _visits(key, steps):
    """The pieces of the lower and of the upper level that each step draws, in epochs."""
    upper, lower = words_of(key)
    counts = jnp.arange(steps)
    first = jax.vmap(lambda c: in_epochs(lower, c, N // SIZE))(counts)
    second = jax.vmap(lambda c: in_epochs(upper, c, M // SIZE))(counts)
    return np.asarray(first), np.asarray(second)


def _rows(number):
    return slice(number * SIZE, (number + 1) * SIZE)


RATES = {"upper_lr": 0.05, "lower_lr": 0.1, "adjoint_lr": 0.2}


def _moved(x, y, z, estimates):
    d_y, product, slope, cross, direct = estimates
    x = x - RATES["upper_lr"] * (direct + cross)
    return x, y - RATES["lower_lr"] * d_y, z - RATES["adjoint_lr"] * (product - slope)


def _run(solver, problem, key, steps):
    state = solver.init(problem, jnp.ones(DX), jnp.zeros(DY))
    trail = []
    for _ in range(steps):
        state = solver.step(problem, state, key=key)
        trail.append(state.x)
    return np.asarray(trail), state


def test_saba_step_by_step():
    problem, key, steps = _problem(), jax.random.key(5), 40
    of, (first, second) = _derivatives(problem), _visits(key, steps)
    x, y, z = np.ones(DX), np.zeros(DY), np.zeros(DY)
    pieces = [N // SIZE, N // SIZE, M // SIZE, N // SIZE, M // SIZE]
    tables = [np.zeros((m, d)) for m, d in zip(pieces, (DY, DY, DY, DX, DX), strict=True)]
    trail = []
    for i, j in zip(first, second, strict=True):
        new = of(x, y, z, _rows(i), _rows(j))
        places = (i, i, j, i, j)
        estimates = []
        for table, value, place in zip(tables, new, places, strict=True):
            estimates.append(value - table[place] + table.mean(0))
            table[place] = value
        # The implicit part enters with a minus, and G, cross have z of the sign of ours.
        x, y, z = _moved(x, y, z, estimates)
        trail.append(x)
    found, state = _run(aipod.SABA(**RATES), problem, key, steps)
    np.testing.assert_allclose(found, trail, rtol=1e-11, atol=1e-12)
    assert int(state.counts.lower_samples) == 3 * SIZE * steps
    assert int(state.counts.upper_samples) == SIZE * steps


def test_srba_step_by_step():
    problem, key, steps, period = _problem(), jax.random.key(6), 40, 6
    of, (first, second) = _derivatives(problem), _visits(key, steps)
    x, y, z = np.ones(DX), np.zeros(DY), np.zeros(DY)
    last, estimates, trail = None, None, []
    for k, (i, j) in enumerate(zip(first, second, strict=True)):
        if k % period == 0:
            estimates = of(x, y, z, slice(None), slice(None))
        else:
            new, old = (of(*at, _rows(i), _rows(j)) for at in ((x, y, z), last))
            estimates = [e + a - b for e, a, b in zip(estimates, new, old, strict=True)]
        last = (x, y, z)
        x, y, z = _moved(x, y, z, estimates)
        trail.append(x)
    found, state = _run(aipod.SRBA(**RATES, period=period), problem, key, steps)
    np.testing.assert_allclose(found, trail, rtol=1e-11, atol=1e-12)
    full = -(-steps // period)
    assert int(state.counts.lower_samples) == 3 * (2 * SIZE * (steps - full) + N * full)
    assert int(state.counts.upper_samples) == 2 * SIZE * (steps - full) + M * full


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: aipod.STORM(2.0), r"weight \(a\) must be a number in \(0, 1\].*got 2.0"),
        (lambda: aipod.HeavyBall(1.5), r"weight \(a\) must be a number in \(0, 1\].*got 1.5"),
        (lambda: aipod.HeavyBall(aipod.Curvature()), r"must be a number in \(0, 1\]"),
        (lambda: aipod.LooplessSVRG(1.5), r"prob must be at most 1, got 1.5: 1 moves the anchor"),
        (lambda: aipod.LooplessSVRG(0.0), "prob must be positive"),
        (lambda: aipod.SARAH(0), "period .* at least 1"),
        (lambda: aipod.SAGA(weight=jnp.ones(2)), "weight"),
        (lambda: aipod.Minibatches(np.ones((4, 2)), 2, epochs="yes"), "epochs must be True or"),
    ],
    ids=range(8),
)
def test_arguments_that_estimators_refuse(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_a_weight_from_an_array_is_a_number():
    assert hash(aipod.SAGA(weight=jnp.asarray(0.5))) == hash(aipod.SAGA(weight=0.5))
    assert aipod.STORM(jnp.asarray(1.0)).weight == 1


@pytest.mark.parametrize(
    ("sizes", "batches", "dtype"),
    [
        ((7, 5), (3, 2), np.float64),
        ((7, 5), (3, 2), np.float32),
        ((3, 2), (64, 64), np.float64),
        ((1, 1), (1, 1), np.float32),
    ],
    ids=["rest", "rest-single", "all", "one-single"],
)
def test_sums_of_any_size_are_solved_exactly(sizes, batches, dtype):
    """Batches that do not divide the data, that are larger than it, and a single example."""
    lower, upper = (
        [leaf[:n].astype(dtype) for leaf in part] for part, n in zip(_data(), sizes, strict=True)
    )
    problem = aipod.Bilevel(
        _upper,
        _lower,
        upper_samples=aipod.Minibatches(upper, batches[1], epochs=True),
        lower_samples=aipod.Minibatches(lower, batches[0], epochs=True),
    )
    x, y = jnp.ones(DX, dtype), jnp.zeros(DY, dtype)
    solver = aipod.VRAiPOD(upper_lr=0.2, lower_lr=0.1, adjoint_lr=0.1)
    solution = aipod.solve(problem, solver, x, y, steps=2500, key=jax.random.key(0))
    assert solution.x.dtype == dtype
    found = float(aipod.stationarity(problem, solution.x, y))
    assert found < (1e-20 if dtype == np.float64 else 1e-9)
    table = solution.state.estimates[0]["gradient"].own
    # The mean of the rows is found by small changes, and must not drift away from them.
    np.testing.assert_allclose(table.mean, table.rows.mean(0), atol=1e-6)
