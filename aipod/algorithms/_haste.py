"""Steps that were made for a curvature which turns out to be larger."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.algorithms._state import State
from aipod.sets import AbstractSet
from aipod.stepsize import HASTY, CurvatureState, looked_at_next


def stiffer(curvature: CurvatureState | None, state: State) -> Array | float:
    """How many times larger the curvature is than it was one step before."""
    if curvature is None or state.curvature is None:
        return 1.0
    before = state.curvature.estimate
    return jnp.where(before > 0, curvature.estimate / jnp.where(before > 0, before, 1.0), 1.0)


# Without clients: an outer step that moves y so many times further than any of late, or out of all
# numbers, is repeated with a quarter of the step size, as long as that is not this many times
# shorter than usual: then something else is wrong. The first steps tell how far is usual.
_FURTHER, _SHORTER, _SHORTEST, _FIRST = 10.0, 4.0, 1e7, 50
# How far y moved is forgotten by 1 % in each step.
_FORGET = 0.99


def hastiness(
    lower_set: AbstractSet,
    used: Array | None,
    curvature: CurvatureState | None,
    y: PyTree,
    old: State,
    unseen: Array | None = None,
) -> tuple[Array | None, CurvatureState | None]:
    """Whether the steps that led to y were too hasty, and the curvature to go on with.

    Clients learn the largest of their curvatures at the end of a step, for the next one. Where it
    has jumped, the local steps just made were too long, and all clients take them back alike.
    Without a server they could not do so alike, and need not: each uses what it finds at once.
    `unseen`: that local steps ran away while nobody looked at the curvature, which is then looked
    at in the next step.

    A problem without clients knows its curvature at once, but not that which lies within the reach
    of several steps, beyond the edge of a logarithm for example.
    """
    if used is None or curvature is None or lower_set.apart:
        return None, curvature
    if lower_set.per_client:
        hasty = curvature.estimate > HASTY * used
        if unseen is not None:
            hasty, curvature = hasty | unseen, looked_at_next(curvature, unseen)
        return hasty, curvature
    moved = optax.tree.norm(optax.tree.sub(y, old.y)).astype(curvature.reach.dtype)
    jumped = (old.step >= _FIRST) & (moved > _FURTHER * curvature.reach)
    shorter = (_SHORTER * used).astype(curvature.estimate.dtype)
    hasty = (jumped | ~jnp.isfinite(moved)) & (shorter < _SHORTEST * curvature.usual)
    reach = jnp.where(hasty, curvature.reach, jnp.maximum(moved, _FORGET * curvature.reach))
    estimate = jnp.where(hasty, shorter, curvature.estimate)
    return hasty, dataclasses.replace(curvature, estimate=estimate, reach=reach)


def unless(hasty: Array | None, new: State, old: State) -> State:
    """The new state, with the old x, y and slots where the steps were too hasty.

    What the watch saw is left out by itself.
    """
    if hasty is None:
        return new

    def parts(state: State) -> tuple[PyTree, ...]:
        return state.x, state.y, state.lower, state.adjoint, state.upper

    kept = jax.tree.map(lambda a, b: jnp.where(hasty, b, a), parts(new), parts(old))
    x, y, lower, adjoint, upper = kept
    return dataclasses.replace(new, x=x, y=y, lower=lower, adjoint=adjoint, upper=upper)
