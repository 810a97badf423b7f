"""When a large federation looks at the curvature of its lower level.

A look costs as much as several local steps. From 1,000 clients on, all of whom make every outer
step on all of their data, it is taken in every eighth step alone; but in each of the first ones, in
the step after one in which the curvature has grown by more than 3 %, or has fallen faster than the
estimate forgets, and in the one after local steps have run away. The steps since the last look are
counted from 0 on.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel, is_random

_MANY, _PAUSE, _ALWAYS, _GROWS = 1_000, 8, 20, 1.03
# In place of the steps since the last look: the next step must look.
AT_ONCE = -1.0
# Older estimates are forgotten as if the steps in between had seen the same; but since one look is
# one chance to see all, after a pause as after so many steps at most.
_FORGOTTEN = 4.0


def pause_between_looks(problem: Bilevel, y: PyTree, *, watched: bool) -> int:
    """From how many outer steps one looks at the curvature.

    `watched`: whether the lower slot tells when its steps run away.
    """
    lower_set = problem.lower_set
    if not (watched and lower_set.per_client and lower_set.averages) or lower_set.apart:
        return 1
    if is_random(problem.lower_samples):
        # Every batch has a curvature of its own, and the steps in between meet it.
        return 1
    rows = jax.tree.leaves(y)[0].shape[0]
    return _PAUSE if lower_set.members_in_all(rows) >= _MANY else 1


def is_due(since: Array, step: Array, pause: int) -> Array:
    """Whether an outer step looks."""
    return (step < _ALWAYS) | (since < 0) | (since >= pause - 1)


def first_of_a_pause(estimate: Array, before: Array, now: Array) -> Array:
    """What to count from after a look that has found `now`: 0, or `AT_ONCE` where more is due.

    That is where the estimate has grown, or is held up by what it remembers: it forgets by looking,
    and steps would be too short for long.
    """
    more = (estimate > _GROWS * before) | (estimate > _GROWS * now)
    return jnp.where(more, AT_ONCE, 0.0)


def after_a_pause(since: Array, kept: float, stays: float) -> tuple[Any, Any]:
    """How much is kept of the largest and of the usual estimate, from what is kept in a step."""
    steps = jnp.maximum(since + 1, 1.0)
    return kept ** jnp.minimum(steps, _FORGOTTEN), stays**steps
