"""Steps that were made for a curvature which turns out to be larger."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.algorithms._state import State
from aipod.sets import AbstractSet
from aipod.stepsize import HASTY, CurvatureState


def stiffer(curvature: CurvatureState | None, state: State) -> Array | float:
    """How many times larger the curvature is than it was one step before."""
    if curvature is None or state.curvature is None:
        return 1.0
    before = state.curvature.estimate
    return jnp.where(before > 0, curvature.estimate / jnp.where(before > 0, before, 1.0), 1.0)


def unless_hasty(lower_set: AbstractSet, used: Array | None, new: State, old: State) -> State:
    """The new state, with the old x, y and slots where the steps were too hasty.

    Clients learn the largest of their curvatures at the end of a step, for the next one. Where it
    has jumped, the local steps just made were too long, and all clients take them back alike.
    Without a server they could not do so alike, and need not: each uses what it finds at once.
    """
    if used is None or new.curvature is None or not lower_set.per_client or lower_set.apart:
        return new
    hasty = new.curvature.estimate > HASTY * used

    def parts(state: State) -> tuple[PyTree, ...]:
        return state.x, state.y, state.lower, state.adjoint, state.upper, state.watch

    kept = jax.tree.map(lambda a, b: jnp.where(hasty, b, a), parts(new), parts(old))
    x, y, lower, adjoint, upper, watch = kept
    return dataclasses.replace(
        new, x=x, y=y, lower=lower, adjoint=adjoint, upper=upper, watch=watch
    )
