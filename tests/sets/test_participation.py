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
        made.check(jnp.zeros((clients, 3)), name="lower_set")
    share = float(enough.split()[0].rstrip(","))
    better = aipod.Consensus(participation=share)
    better.check(jnp.zeros((clients, 3)))
    assert better.present(clients) == 2


def test_a_single_client_and_two_of_many_are_not_refused():
    aipod.Consensus(participation=0.1).check(jnp.zeros((1, 3)))
    aipod.Consensus(participation=0.5).check(jnp.zeros((3, 3)))  # 1.5 rounds to 2


def test_why_one_client_is_not_enough():
    """Its correction never changes; the corrections of two do."""
    y = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))

    def changed(participation):
        made = aipod.Consensus(participation=participation)
        options = {"rate": jnp.array(0.1), "probability": 0.5, "key": jax.random.key(0)}
        _, correction, _ = settle(made, y, jnp.zeros_like(y), **options)
        np.testing.assert_allclose(jnp.sum(correction, axis=0), 0.0, atol=1e-12)
        return float(jnp.max(jnp.abs(correction)))

    assert changed(0.25) == 0.0
    assert changed(0.5) > 0.1
