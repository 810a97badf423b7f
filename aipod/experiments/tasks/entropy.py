"""Entropy and logarithm, extended to negative arguments.

The entropy keeps flows and couplings positive, but between two projections an iterate may have
negative entries, where y log y is not defined. Below a small `floor` both functions continue with
the same value, slope and curvature. The entropy is then strongly convex everywhere, with curvature
at most 1 / floor, and unchanged where all entries are above the floor.
"""

import jax.numpy as jnp
from jaxtyping import Array


def entropy(y: Array, floor: float) -> Array:
    """y log y for each entry; below the floor, its quadratic Taylor polynomial at the floor."""
    inside = jnp.where(y > floor, y, floor)
    below = jnp.where(y > floor, 0.0, y - floor)
    slope = jnp.log(jnp.asarray(floor)) + 1
    return inside * jnp.log(inside) + slope * below + below**2 / (2 * floor)


def logarithm(y: Array, floor: float) -> Array:
    """log y for each entry; below the floor, its quadratic Taylor polynomial at the floor."""
    inside = jnp.where(y > floor, y, floor)
    below = jnp.where(y > floor, 0.0, y - floor) / floor
    return jnp.log(inside) + below - below**2 / 2
