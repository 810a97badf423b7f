"""The entropy that keeps flows and couplings positive, continued to where it is not defined.

y log y needs y > 0, but an iterate between two projections may step out of the positive orthant.
Below a small `floor` both functions here go on with the same value, slope and curvature: strongly
convex everywhere, curvature at most 1 / floor, and nothing changes where all entries are above it.
"""

import jax.numpy as jnp
from jaxtyping import Array


def entropy(y: Array, floor: float) -> Array:
    """y log y, entry by entry; below the floor its quadratic Taylor polynomial there."""
    inside = jnp.where(y > floor, y, floor)
    below = jnp.where(y > floor, 0.0, y - floor)
    slope = jnp.log(jnp.asarray(floor)) + 1
    return inside * jnp.log(inside) + slope * below + below**2 / (2 * floor)


def logarithm(y: Array, floor: float) -> Array:
    """log y, entry by entry; below the floor the quadratic Taylor polynomial there."""
    inside = jnp.where(y > floor, y, floor)
    below = jnp.where(y > floor, 0.0, y - floor) / floor
    return jnp.log(inside) + below - below**2 / 2
