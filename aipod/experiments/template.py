"""A bilevel problem of my own.

aipod check NAME.py:task
aipod run NAME.py:task --solver e-aipod --steps 500
aipod compare NAME.py:task --solvers aipod,e-aipod,e3-aipod --seeds 3
aipod report runs
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

import aipod


def task(
    goods: Annotated[int, "how many goods the budget buys"] = 5,
    noise: Annotated[float, "noise in the gradients of both levels"] = 0.01,
) -> tuple[aipod.Bilevel, jax.Array, jax.Array, Any]:
    """Prices that steer how a budget is spent."""
    wanted = jnp.arange(1.0, goods + 1) / jnp.sum(jnp.arange(1.0, goods + 1))
    problem = aipod.Bilevel(
        # What is minimised over x, the prices: y is the best answer to them.
        upper=lambda x, y, batch: jnp.sum((y - wanted) ** 2) + 0.01 * jnp.sum(x**2) + batch(x, y),
        # What is minimised over y, given x.
        lower=lambda x, y, batch: jnp.sum(y**2) + jnp.dot(x, y) + batch(x, y),
        upper_set=aipod.Budget(0.0),  # the prices add up to zero
        lower_set=aipod.Budget(1.0),  # the budget is spent
        # With data of your own: aipod.Minibatches((inputs, targets), 64).
        upper_samples=aipod.Noise(noise),
        lower_samples=aipod.Noise(noise),
    )

    def record(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        # Written to metrics.csv and drawn; the first name is what a comparison compares.
        return {"distance": jnp.sum((y - wanted) ** 2), "prices": jnp.linalg.norm(x)}

    return problem, jnp.zeros(goods), jnp.full(goods, 1 / goods), record
