"""How many clients take part in a round, and why one alone is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.slots._proxskip import settle


@pytest.mark.parametrize(
    ("participation", "clients", "enough"),
    [
        (0.25, 4, "0.5 or more"),
        (0.1, 10, "0.2 or more"),
        (0.01, 50, "0.04 or more"),
        (0.5, 2, "1,"),
    ],
)
def test_one_client_of_many_in_a_round_is_refused(participation, clients, enough):
    made = aipod.Consensus(participation=participation)
    message = f"lower_set is Consensus.*one of {clients} clients.*Choose participation={enough}"
    with pytest.raises(ValueError, match=message):
        made.check_corrections(jnp.zeros((clients, 3)), name="lower_set")
    share = float(enough.split()[0].rstrip(","))
    better = aipod.Consensus(participation=share)
    better.check_corrections(jnp.zeros((clients, 3)))
    assert better.present(clients) == 2


def test_a_single_client_and_two_of_many_are_not_refused():
    aipod.Consensus(participation=0.1).check_corrections(jnp.zeros((1, 3)))
    aipod.Consensus(participation=0.5).check_corrections(jnp.zeros((3, 3)))  # 1.5 rounds to 2


def federation(participation):
    data = np.ones((4, 5, 2))
    return aipod.federated.federate(
        lambda x, y, batch: jnp.mean((batch @ y - 1) ** 2) + jnp.sum(x**2),
        lambda x, y, batch: jnp.mean((batch @ y - x[0]) ** 2) + jnp.sum(y**2),
        data,
        data,
        batch_size=2,
        participation=participation,
    )


@pytest.mark.parametrize(
    "solver",
    [aipod.EAiPOD(upper_lr=0.1), aipod.E2AiPOD(upper_lr=0.1), aipod.E3AiPOD()],
    ids=["e-aipod", "e2-aipod", "e3-aipod"],
)
def test_solvers_with_corrections_refuse_it(solver):
    x, y = jnp.zeros((4, 1)), jnp.zeros((4, 2))
    with pytest.raises(ValueError, match=r"lower_set is Consensus.*one alone cannot correct"):
        solver.init(federation(0.25), x, y)
    solver.init(federation(0.5), x, y)


@pytest.mark.parametrize("solver", [aipod.AiPOD, aipod.FedNest, aipod.FedAvg])
def test_solvers_without_corrections_take_it(solver):
    solver(upper_lr=0.1).init(federation(0.25), jnp.zeros((4, 1)), jnp.zeros((4, 2)))


def test_why_one_client_is_not_enough():
    """Its correction never changes; the corrections of two do."""
    y = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))

    def changed(participation):
        made = aipod.Consensus(participation=participation)
        options = {"lr": jnp.array(0.1), "probability": 0.5, "key": jax.random.key(0)}
        _, correction, _ = settle(made, y, jnp.zeros_like(y), **options)
        np.testing.assert_allclose(jnp.sum(correction, axis=0), 0.0, atol=1e-12)
        return float(jnp.max(jnp.abs(correction)))

    assert changed(0.25) == 0.0
    assert changed(0.5) > 0.1
