"""Which bounds of the lower set are active: decided from the projections that a slot makes anyway.

Where a step is projected, the bounds that it meets push back. In the mean over many steps that push
is the bound's multiplier, also where noise makes single steps leave the bound. A bound is active
where its mean multiplier, times a step, is at least the mean distance of y from it.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel, is_random
from aipod.sets import AbstractSet
from aipod.slots._settling import Met
from aipod.slots._turn import Turn

# The weight of the newest outer step in the mean, where the lower level is sampled.
_NEWEST = 0.1


class Facing(eqx.Module):
    """What is kept of the bounds from one outer step to the next.

    - `multipliers`: of the bounds, in the mean; positive at lower bounds, negative at upper ones.
    - `point`: y, in the mean.
    - `active`: as a face has it.
    - `shared`: of ProxSkip, where clients agree, the part of their corrections that they share.

    Where clients agree, all of it is about the point of one client.
    """

    multipliers: PyTree
    point: PyTree
    active: PyTree
    shared: PyTree = None

    def met(self) -> Met:
        """Before the first projection of an outer step."""
        agreed = self.point if self.shared is not None else None
        return Met(optax.tree.zeros_like(self.multipliers), agreed, self.shared)

    def after(
        self, turn: Turn, y: PyTree, met: Met, count: Array | int, *, lr: Array, steps: Array
    ) -> "Facing":
        """After an outer step.

        **Arguments:**

        - `y`: where it ended.
        - `met`, `count`: what its projections met, and how many there were.
        - `lr`, `steps`: the size of its steps on y, and how many of them such a multiplier is the
            mean of.
        """
        newest = _NEWEST if is_random(turn.problem.lower_samples) else 1.0
        count = jnp.asarray(count)
        share = jnp.where(count > 0, newest, 0.0) / jnp.maximum(count, 1)
        kept = jnp.where(count > 0, 1 - newest, 1.0)

        def mean(old: Array, now: Array) -> Array:
            return (kept * old + share * now).astype(old.dtype)

        multipliers = jax.tree.map(mean, self.multipliers, met.multipliers)
        # Between projections clients go their own ways.
        y = turn.problem.lower_set.single(y) if met.point is None else met.point
        point = axpy(self.point, newest, optax.tree.sub(y, self.point))
        push = optax.tree.scale(_length(turn, lr, steps), multipliers)
        active = turn.problem.lower_set.sides(point, push, turn.x, previous=self.active)
        return Facing(multipliers, point, active, met.shared)


def _length(turn: Turn, lr: Array, steps: Array) -> Array:
    """The step that weighs multipliers against distances: 1 over the curvature l, or a guess at it.

    In noise an entry near a bound is off its minimiser by some b in the mean, and the bound's mean
    multiplier has a part of at most l b. A longer step would take that for an active bound.
    """
    curvature = turn.rates.curvature
    guess = lr * jnp.sqrt(steps)
    if curvature is None:
        return guess
    return jnp.where(curvature > 0, 1 / jnp.where(curvature > 0, curvature, 1.0), guess)


def nothing_faced(
    lower_set: AbstractSet, x: PyTree, y: PyTree, *, corrected: bool = True
) -> Facing | None:
    """Before the first step: no bound is active. None for an affine set, which is its own face.

    `corrected`: whether the slot has corrections, of which clients share a part.
    """
    if lower_set.affine:
        return None
    y = lower_set.single(y)
    zeros = optax.tree.zeros_like(y)
    marks: Any = eqx.filter_eval_shape(lower_set.sides, y, zeros, x)
    inactive = jax.tree.map(lambda mark: jnp.zeros(mark.shape, mark.dtype), marks)
    shared = zeros if corrected and lower_set.agreement is not None else None
    return Facing(zeros, y, inactive, shared)


def on_face(problem: Bilevel, facing: Facing | None) -> Bilevel:
    """The problem with the active face in place of a lower set that has bounds."""
    if facing is None or problem.lower_set.affine:
        return problem
    face = problem.lower_set.holding(facing.active)
    return dataclasses.replace(problem, lower_set=face)


def is_face(lower_set: AbstractSet) -> bool:
    """Whether a set is the face of one with bounds, so that it may be another one in each step."""
    return bool(jax.tree.leaves(lower_set.active))


def turned(lower_set: AbstractSet, u: PyTree, correction: PyTree) -> tuple[PyTree, PyTree]:
    """A warm adjoint's u and e on a face that may have changed: P u and e - P e.

    Both stay as they are, but for rounding, where the face has not changed.
    """
    stray = lower_set.tangent(correction)
    inside = jax.tree.map(lambda old, new: new.astype(old.dtype), u, lower_set.tangent(u))
    return inside, axpy(correction, -1.0, stray)


def refuse_bounds(problem: Bilevel, slot: Any) -> None:
    """Raises `ValueError` for a slot that cannot tell which bounds of the lower set are active."""
    if not problem.lower_set.affine:
        raise ValueError(
            f"lower_set has bounds, which {type(slot).__name__} does not take: use "
            "aipod.ProjectedSGD, aipod.ProxSkip or aipod.OneRound, which the solvers AiPOD, EAiPOD "
            "and E3AiPOD have."
        )
