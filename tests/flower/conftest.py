"""The small federation that most tests of Flower run."""

import jax.numpy as jnp
import pytest

from aipod import federated
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper

CLIENTS = 3


@pytest.fixture(scope="module")
def ridge():
    """Three weighted clients, and where they start."""
    data = client_data(CLIENTS, 6)
    problem = federated.federate(
        ridge_upper, ridge_lower, data, data, batch_size=3, weights=[1.0, 2.0, 3.0]
    )
    return problem, *(federated.replicate(jnp.full(3, v), CLIENTS) for v in (0.3, -0.2))
