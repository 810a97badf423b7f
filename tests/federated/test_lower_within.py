"""y common to all clients and in a convex set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated

KEY = jax.random.key(0)
M, N = 4, 5
RNG = np.random.default_rng(2)
DATA = (
    RNG.normal(size=(M, 1, N)),
    RNG.uniform(0.5, 2.0, size=(M, 1, N)),
    RNG.normal(size=(M, 1, N)),
)
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.5])
START = jnp.full(N, 0.2)
X0, Y0 = federated.replicate(START, M), federated.replicate(START, M)
SETS = {
    "simplex": aipod.Simplex(),
    "capped": aipod.CappedSimplex(1.0, np.array([0.2, 1.0, 1.0, 1.0, 1.0])),
    "affine": aipod.Bounded(aipod.Affine(np.ones((1, N)), np.ones(1)), 0.0, 0.8),
    "box": aipod.Box(-0.2, 0.3),
    "moving": aipod.Box(-0.1, lambda x: 0.2 + 0.1 * jnp.tanh(x)),
}


def lower(x, y, batch):
    curves, shifts = (jnp.mean(part, axis=0) for part in batch[1:])
    coupled = 0.05 * jnp.sum(y[1:] * y[:-1])
    return 0.5 * jnp.sum(curves * (y - x - shifts) ** 2) + 0.1 * jnp.sum(y**2) + coupled


def upper(x, y, batch):
    return 0.5 * jnp.sum((y - jnp.mean(batch[0], axis=0)) ** 2) + 0.05 * jnp.sum(x**2)


def problems(within, weights=WEIGHTS, data=DATA, upper_set=None, **options):
    """The federation, and the problem of all its data on one machine."""
    many = federated.federate(
        upper,
        lower,
        data,
        data,
        batch_size=None,
        weights=weights,
        upper_set=upper_set,
        lower_set=within,
        **options,
    )
    shares = jnp.full(M, 1 / M) if weights is None else jnp.asarray(weights / weights.sum())

    def mean(loss):
        return lambda x, y, _: shares @ jax.vmap(lambda *b: loss(x, y, b))(*DATA)

    central = aipod.Bilevel(
        mean(upper), mean(lower), upper_set=upper_set or aipod.Free(), lower_set=within
    )
    return many, central


@pytest.mark.parametrize("kind", SETS)
def test_exact_values_are_those_of_one_machine(kind):
    many, central = problems(SETS[kind])
    y = aipod.exact_lower(many, X0, Y0)
    np.testing.assert_allclose(y[0], aipod.exact_lower(central, START, START), atol=1e-13)
    slope = jnp.sum(aipod.exact_hypergradient(many, X0, Y0), axis=0)

    def value(x):
        rows = federated.replicate(x, M)
        batch = many.upper_samples.expected()
        return float(many.upper(rows, aipod.exact_lower(many, rows, Y0), batch))

    for i in (0, 3):
        way = 1e-5 * jnp.eye(N)[i]
        difference = (value(START + way) - value(START - way)) / 2e-5
        assert abs(difference - slope[i]) < 1e-7


@pytest.mark.parametrize(
    ("kind", "solver", "upper_set"),
    [
        ("simplex", aipod.E3AiPOD(upper_lr=0.3), aipod.Box(-0.3, 0.25)),
        ("moving", aipod.E3AiPOD(upper_lr=0.3, compression="bfloat16"), None),
        ("affine", aipod.EAiPOD(upper_lr=0.5), None),
        ("box", aipod.AiPOD(upper_lr=0.5), None),
        (
            "capped",
            aipod.E3AiPOD(upper_optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 800))),
            None,
        ),
        ("simplex", aipod.E2AiPOD(upper_lr=0.3), None),
    ],
    ids=["E3-AiPOD", "E3-AiPOD, 16 bits", "E-AiPOD", "AiPOD", "E3-AiPOD, Adam", "E2-AiPOD"],
)
def test_clients_together_find_what_one_machine_finds(kind, solver, upper_set):
    # Clients of unequal size: examples that are repeated do not change a client's means.
    sizes = [1 + m % 2 for m in range(M)]
    data = [tuple(np.repeat(part[m], sizes[m], axis=0) for part in DATA) for m in range(M)]
    many, central = problems(SETS[kind], data=data, upper_set=upper_set)
    solution = aipod.solve(many, solver, X0, Y0, 800, key=KEY)
    x = solution.x[0]
    assert np.ptp(np.asarray(solution.x), axis=0).max() == 0
    assert float(aipod.stationarity(central, x, START)) < 1e-16
    y = aipod.exact_lower(central, x, START)
    np.testing.assert_allclose(solution.y[0], y, atol=1e-9)
    # Some bound holds, so that leaving it out would show.
    free = aipod.Bilevel(central.upper, central.lower)
    assert np.abs(aipod.exact_lower(free, x, START) - y).max() > 1e-2


def test_aipod_makes_the_steps_that_it_makes_on_one_machine():
    many, central = problems(SETS["simplex"])
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.2, lower_steps=3, adjoint_steps=4, adjoint_lr=0.2)
    together = aipod.solve(many, solver, X0, Y0, 20, key=KEY)
    alone = aipod.solve(central, solver, START, START, 20, key=KEY)
    np.testing.assert_allclose(together.x[0], alone.x, atol=1e-12)
    np.testing.assert_allclose(together.y[0], alone.y, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "weights", "steps"),
    [
        (aipod.E3AiPOD, WEIGHTS, 1500),
        (functools.partial(aipod.E3AiPOD, compression="float8"), WEIGHTS, 1500),
        (aipod.EAiPOD, None, 600),
    ],
    ids=["E3-AiPOD", "E3-AiPOD, 8 bits", "E-AiPOD"],
)
def test_absent_clients_leave_no_error_in_y(method, weights, steps):
    many, central = problems(SETS["simplex"], weights=weights, participation=0.5)
    solution = aipod.solve(many, method(upper_lr=1e-14), X0, Y0, steps, key=KEY)
    y = aipod.exact_lower(central, START, START)
    np.testing.assert_allclose(solution.y, federated.replicate(y, M), atol=1e-9)


def test_the_projection_costs_no_round_and_counts_no_rows():
    many, _ = problems(SETS["simplex"])
    solution = aipod.solve(many, aipod.E3AiPOD(upper_lr=0.1), X0, Y0, 7, key=KEY)
    assert solution.ledger.rounds == 7
    # Each client sends y, u and a gradient, in each of the rounds.
    assert solution.ledger.bytes_up == 7 * 3 * N * 8
    assert solution.kept.y.shape == (1, N)
    report = aipod.check(many, X0, Y0, key=KEY)
    assert report.active_bounds == 2
    assert "2 bounds of 5 entries" in str(report)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="lower_set must be a set for one client's y, such as"):
        problems(aipod.Consensus())
    with pytest.raises(ValueError, match="lower_set and graph do not go together"):
        problems(aipod.Simplex(), weights=None, graph="ring")
    many, _ = problems(SETS["simplex"])
    with pytest.raises(ValueError, match="lower_set has bounds, which"):
        aipod.solve(many, aipod.FedNest(upper_lr=0.1), X0, Y0, 2, key=KEY)
