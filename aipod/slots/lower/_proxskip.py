"""ProxSkip: the lower level of E-AiPOD and E2-AiPOD."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel, is_random
from aipod.slots._asking import lower_oracle
from aipod.slots._cost import Cost
from aipod.slots._facing import Facing, nothing_faced, on_face
from aipod.slots._proxskip import watched_proxskip
from aipod.slots._spelling import once_is_one_round
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.slots.lower._one_round import OneRound
from aipod.stepsize import (
    Curvature,
    StepSize,
    Tempering,
    adapts,
    check_lr,
    check_probability,
    check_steps,
)

# How far y may be off a set that moves with x, as a share of how far y = 0 is off it.
_FAR = 0.1


class ProxSkipState(eqx.Module):
    """The correction r, on a set with bounds which are active, and how far steps are shortened.

    Where clients agree on a point within bounds, a client's correction is r and what all clients
    share (`facing.shared`).
    """

    correction: PyTree
    facing: Facing | None = None
    tempering: Tempering | None = None


@once_is_one_round
class ProxSkip(AbstractLower):
    """S corrected stochastic gradient steps, few of them projected.

        y_hat = y - beta (grad_y g(x, y; phi) - r)                                    (`update-z`)
        with probability p:  y <- project(y_hat - (beta / p) r, x)                  (`update-yz1`)
                             r <- r + (p / beta) (y - y_hat)                        (`update-yz2`)
        otherwise:           y <- y_hat

    r and y are carried over from one outer step to the next; r tends to grad_y g(x, y*(x)), so
    the skipped projections leave no error behind. On a set with bounds the entries of r hold their
    multipliers, which tell the bounds that are active. Where steps follow the curvature and the set
    moves with x, an outer step that would leave y off by more than a tenth of what the constraint
    asks ends with a projection.

    **Arguments:**

    - `lr` [beta]: the step size, at most 1 / l_g1: the skipped steps see the whole space.
    - `steps` [S]: steps per outer step.
    - `prob` [p]: how often to project. `ProxSkip(prob=None)` is another way to write
        `OneRound()`, which projects exactly once, at the end of the outer step.
    - `compression`: of messages, for `prob=None` alone.

    !!! example
        ```python
        lower = aipod.ProxSkip(lr=0.01, steps=5, prob=0.3)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)
    prob: float = 0.3
    compression: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")
        check_probability(self.prob, "lower_prob (p)")
        if self.compression is not None:
            raise ValueError(
                "compression needs the single projection of aipod.OneRound(), also written "
                "ProxSkip(prob=None): leave compression out, or prob."
            )

    @staticmethod
    def once(**arguments: Any) -> OneRound:
        """What `prob=None` makes."""
        return OneRound(**({"steps": 5} | arguments))

    @property
    def draws(self) -> int:
        return self.steps

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        problem.lower_set.check_corrections(y, name="lower_set")
        facing = nothing_faced(problem.lower_set, x, y)
        tempering = Tempering.first(self.lr, problem.lower_set, y, skips=True)
        return ProxSkipState(optax.tree.zeros_like(y), facing, tempering)

    def faced(self, problem: Bilevel, state: PyTree) -> Bilevel:
        return on_face(problem, state.facing)

    def share(self, state: PyTree) -> Array | float:
        return 1.0 if state.tempering is None else state.tempering.share

    def common(self, problem: Bilevel) -> bool:
        return problem.lower_set.cohorts

    def own(self, state: PyTree) -> PyTree:
        mask = jax.tree.map(lambda _: False, state)
        return eqx.tree_at(
            lambda s: s.correction, mask, jax.tree.map(lambda _: True, state.correction)
        )

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lr, facing, tempering = turn.lr(self.lr), state.facing, state.tempering
        if tempering is not None:
            lr = lr * tempering.share
        found = watched_proxskip(
            lower_oracle(turn, self.steps),
            turn.lower_set,
            turn.y,
            state.correction,
            lr=lr,
            probability=self.prob,
            steps=self.steps,
            key=turn.key,
            # Who was absent must be able to go on from what the others have found.
            last=turn.problem.lower_set.cohorts,
            watched=False,
            memory=turn.memory,
            met=None if facing is None else facing.met(),
            landed=None if tempering is None else tempering.last,
            far=self._far(turn) if facing is None else None,
        )
        if found.met is not None:
            y, made = found.point, found.projections
            steps = jnp.maximum(self.steps, 1 / self.prob)
            facing = facing.after(turn, y, found.met, made, lr=lr, steps=steps)
        if tempering is not None and is_random(turn.problem.lower_samples):
            # Where the set is the whole space, every point is as good as projected.
            points: Any = (tempering.last, found.landed, found.projections > 0)
            if tempering.last is None:
                points = (turn.y, found.point)
            tempering = tempering.after(
                *points, step=turn.step, paced=turn.moves is not None, uneven=turn.rates.uneven
            )
        cost = turn.lower_cost(found.projections, lower_draws=self.steps, memory=found.memory)
        return found.point, ProxSkipState(found.correction, facing, tempering), cost

    def _far(self, turn: Turn) -> Callable[[PyTree], Array] | None:
        """Whether a point is far off a set that moves with x; None where y may be.

        Local steps lead off the set while x carries it away, and where the lower level is not
        defined everywhere, y must not be far from it. Far is a share of what y = 0 would be off by,
        which has the same unit. Clients cannot tell it without a round.
        """
        lower_set, whole = turn.lower_set, turn.problem.lower_set
        if not adapts(self.lr) or not whole.coupled or whole.federated:
            return None
        scale = optax.tree.norm(lower_set.residual(optax.tree.zeros_like(turn.y)))
        # A scale of 0, a set through 0, tells nothing.
        return lambda y: (optax.tree.norm(lower_set.residual(y)) > _FAR * scale) & (scale > 0)
