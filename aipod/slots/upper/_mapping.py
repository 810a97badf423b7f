"""The direction that an optimiser of x is given: P_x d, or with bounds the gradient mapping."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.sets import AbstractSet

# Before x has moved, eta is such that eta d is this share of x.
_SHARE = 1e-2


def first_length(problem: Bilevel, x: PyTree) -> Array | None:
    """eta before the first step, not yet known; None where the upper set has no bounds."""
    if problem.upper_set.affine:
        return None
    return jnp.zeros((), jnp.result_type(*jax.tree.leaves(x)))


def mapped(
    upper_set: AbstractSet, x: PyTree, direction: PyTree, length: Array | None
) -> tuple[PyTree, Array | None]:
    """P_x d; with bounds G = (x - project_x(x - eta d)) / eta; and eta.

    -eta G leads from x to a point of the set. So for a positive diagonal matrix D the step
    project_x(x - D G) stays at x only where G' D G <= 0: the fixed points of any such optimiser are
    the stationary points. With d itself in place of G they are not.
    """
    if length is None:
        return cast_like(upper_set.tangent(direction), x), None
    # Clients must find the same eta, so the mean of their directions comes first.
    direction = upper_set.averaged(direction)
    way, size = optax.tree.norm(direction), optax.tree.norm(x)
    first = _SHARE * jnp.where(size > 0, size, 1.0) / jnp.where(way > 0, way, 1.0)
    eta = jnp.where(length > 0, length, first).astype(length.dtype)
    landed = cast_like(upper_set.alone(axpy(x, -eta, direction)), x)
    return cast_like(optax.tree.scale(1 / eta, optax.tree.sub(x, landed)), x), eta


def next_length(eta: Array | None, along: PyTree, x: PyTree, new: PyTree) -> Array | None:
    """eta for the next step, which the optimiser's last move along G tells."""
    if eta is None:
        return None
    way, size = optax.tree.norm(optax.tree.sub(new, x)), optax.tree.norm(along)
    found = way / jnp.where(size > 0, size, 1.0)
    usable = (found > 0) & jnp.isfinite(found)
    return jnp.where(usable, found, eta).astype(eta.dtype)
