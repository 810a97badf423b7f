"""The look at the lower level's curvature with which an outer step begins."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.algorithms._state import State
from aipod.problem import Bilevel
from aipod.slots.lower import AbstractLower
from aipod.stepsize import (
    CurvatureState,
    curvature_draws,
    curvature_update,
    pause_between_looks,
)


class Look(NamedTuple):
    """What an outer step knows of the curvature.

    - `curvature`: what is kept of it; None where no step size asks for it.
    - `estimate`: the one that this step uses.
    - `draws`: the batches that were looked at.
    - `paused`: whether there are outer steps that do not look.
    """

    curvature: CurvatureState | None
    estimate: Array | None
    draws: Array | int
    paused: bool

    def unseen(self, lower: AbstractLower, state: PyTree) -> Array | None:
        """Whether local steps ran away while nobody looked; None where every step looks."""
        away = lower.ran_away(state) if self.paused else None
        return None if away is None else away & jnp.asarray(self.draws == 0)


def look(
    lower: AbstractLower, problem: Bilevel, state: State, iterations: int, key: PRNGKeyArray
) -> Look:
    """Looks at the curvature, if that is due."""
    if state.curvature is None:
        return Look(None, None, 0, False)
    watched = lower.ran_away(state.lower) is not None
    pause = pause_between_looks(problem, state.y, watched=watched)
    how: dict[str, Any] = {"key": key, "pause": pause}
    points = (state.x, state.y, state.curvature)
    curvature, estimate = curvature_update(problem, *points, state.step, iterations, **how)
    draws = curvature_draws(state.curvature, state.step, pause)
    return Look(curvature, estimate, draws, pause > 1)
