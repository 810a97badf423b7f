"""One step each time, projected now and then: the upper level of E2-AiPOD."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like, inner
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_moves,
    check_one_of,
)
from aipod.slots.upper._every import EveryStep
from aipod.slots.upper._seen import Seen, UpperState, but_messages, by_difference, nothing_seen
from aipod.stepsize import StepSize, check_steps


class Periodic(AbstractUpper):
    """One step each time, projected when k mod T = 0 only (E2-AiPOD).

        x <- x - alpha (grad_x f + w);   and when k mod T = 0 also x <- project_x(x)   (`WS-x`)

    In gossip (`aipod.Gossip`) a projection is an exchange with the neighbours, and this is
    decentralised SGD: x stops near a solution.

    Between projections x leaves the upper set by O(alpha); `Solution.feasible()` brings it back.

    **Arguments:**

    - `steps` [T]: outer steps from one projection to the next.
    - `lr` [alpha]: the step size.
    - `optimizer`: an `optax.GradientTransformation` in place of `lr`, with T = 1 only: on an
        unprojected gradient its fixed points would not be the stationary points.

    !!! example
        ```python
        upper = aipod.Periodic(steps=5, lr=0.01)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (T)")
        check_moves(self.lr, self.optimizer)
        check_one_of(self.lr, self.optimizer)
        if self.optimizer is not None and self.steps > 1:
            raise ValueError(
                f"upper_optimizer needs a projection in every step, but upper_steps is "
                f"{self.steps}: set upper_steps=1, or use upper_lr."
            )

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        if self.steps == 1:
            return EveryStep(self.lr, self.optimizer, corrected=False).init(problem, x)
        if not problem.upper_set.affine:
            raise ValueError(
                f"upper_set has bounds, which x would leave for upper_steps={self.steps} outer "
                "steps, and outside them the lower level may have no solution: set upper_steps=1."
            )
        seen = nothing_seen(problem, x, difference=True, skips=True)
        return UpperState(None, seen, landed=x)

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state) if self.steps == 1 else None

    def needs_each(self, state: PyTree) -> bool:
        return self.steps > 1

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        if self.steps == 1:
            every = EveryStep(self.lr, self.optimizer, corrected=False)
            return every.update(turn, z, implicit, batch, state)
        upper_set = turn.problem.upper_set
        direction = turn.direction(implicit, batch)
        lr = turn.lr(self.lr)
        moved = axpy(turn.x, -lr, direction)
        due = turn.step % self.steps == 0

        def projected() -> PyTree:
            new = cast_like(upper_set.for_round(turn.round_key).project(moved), moved)
            # The first projection comes after one step, the others after T of them.
            length = lr * jnp.where(turn.step == 0, 1, self.steps)
            seen = by_difference(state.seen, state.landed, new, length)
            apart: Any = jax.tree.map(jnp.subtract, moved, new)
            off = inner(apart, apart, per_client=upper_set.per_client).astype(seen.rate.dtype)
            return new, dataclasses.replace(seen, off=off), new

        def skipped() -> PyTree:
            return moved, state.seen, state.landed

        new, seen, landed = jax.lax.cond(due, projected, skipped)
        seen = dataclasses.replace(seen, fresh=due)
        return new, UpperState(None, seen, landed=landed), turn.upper_cost(due.astype(jnp.int32))
