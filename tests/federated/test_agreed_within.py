"""x common to all clients and in a convex set."""

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
TARGETS = RNG.normal(size=(M, 1, N))
CURVES = RNG.uniform(0.5, 2.0, size=(M, 1, N))
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.5])


def lower(x, y, batch):
    return 0.5 * jnp.sum(batch[1][0] * (y - x) ** 2) + 0.1 * jnp.sum(y**2)


def upper(x, y, batch):
    return 0.5 * jnp.sum((y - batch[0][0]) ** 2)


def problems(within, **options):
    data = (TARGETS, CURVES)
    many = federated.federate(
        upper, lower, data, data, batch_size=None, weights=WEIGHTS, upper_set=within, **options
    )
    shares = jnp.asarray(WEIGHTS / WEIGHTS.sum())

    def mean(loss):
        return lambda x, y, _: shares @ jax.vmap(lambda *b: loss(x, y, b))(TARGETS, CURVES)

    return many, aipod.Bilevel(mean(upper), mean(lower), upper_set=within)


X0 = federated.replicate(jnp.full(N, 1 / N), M)
Y0 = federated.replicate(jnp.zeros(N), M)


@pytest.mark.parametrize("within", [aipod.Simplex(), aipod.Box(-0.2, 0.3), aipod.Budget(1.0)])
@pytest.mark.parametrize(
    "solver",
    [
        aipod.E3AiPOD(upper_lr=0.3),
        aipod.EAiPOD(upper_optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 1500))),
    ],
    ids=["E3-AiPOD", "E-AiPOD, Adam"],
)
def test_clients_together_find_what_one_machine_finds(within, solver):
    many, central = problems(within)
    solution = aipod.solve(many, solver, X0, Y0, 1500, key=KEY)
    x = np.asarray(solution.x)
    assert np.ptp(x, axis=0).max() == 0
    assert float(aipod.stationarity(central, jnp.asarray(x[0]), y0=jnp.zeros(N))) < 1e-10
    if not within.affine:
        # Some bound holds, so that leaving it out would show.
        free = problems(aipod.Free())[0]
        away = aipod.solve(free, solver, X0, Y0, 1500, key=KEY).x
        assert np.abs(np.asarray(away) - x).max() > 1e-2


def test_the_projection_costs_no_round():
    many, _ = problems(aipod.Simplex())
    solution = aipod.solve(many, aipod.E3AiPOD(), X0, Y0, 7, key=KEY)
    assert solution.ledger.rounds == 7
    assert solution.kept.x.shape == (1, N)
    half, _ = problems(aipod.Simplex(), participation=0.5)
    some = aipod.solve(half, aipod.E3AiPOD(upper_lr=0.1), X0, Y0, 7, key=KEY)
    np.testing.assert_allclose(np.sum(some.x, axis=1), 1, rtol=1e-12)
    assert "upper set" in str(some)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="upper_set must be a set for one client's x"):
        problems(aipod.Consensus())
