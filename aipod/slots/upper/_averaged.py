"""A moving average of the hypergradient: the upper level of D-SOBA and SPARKLE."""

from typing import Any

import equinox as eqx
import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import AbstractUpper, check_moves
from aipod.slots.upper._gossip import first_alone, next_alone
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    nothing_seen,
)
from aipod.stepsize import StepSize, check_probability


class MovingAverage(AbstractUpper):
    """One step along an average of the hypergradients so far, older ones counting less.

        h <- (1 - theta) h + theta (grad_x f + w),   x <- project_x(x - alpha h)

    In gossip (`aipod.Gossip`) an exchange with the neighbours takes the place of the projection.

    **Arguments:**

    - `lr` [alpha]: the step size.
    - `share` [theta]: how much the newest hypergradient counts, in (0, 1].
    - `corrected`: in gossip, whether x is corrected by exact diffusion, as in `EveryStep`.

    !!! example
        ```python
        upper = aipod.MovingAverage(lr=0.01, share=0.3)
        ```
    """

    lr: StepSize
    share: float = 0.3
    corrected: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_moves(self.lr, None)
        check_probability(self.share, "share (theta)")

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        average = optax.tree.zeros_like(x)
        if problem.upper_set.apart:
            state = first_alone(problem, None, x)
            return UpperState(average, state.seen, correction=state.correction)
        return UpperState(average, nothing_seen(problem, x, difference=True))

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        slope = turn.direction(implicit, batch)
        average = axpy(optax.tree.scale(1 - self.share, state.own), self.share, slope)
        x, upper_set, lr = turn.x, turn.problem.upper_set, turn.lr(self.lr)
        if upper_set.apart:
            how = (turn, self.lr, None, self.corrected)
            new, kept, cost = next_alone(*how, average, implicit, batch, state)
            return new, UpperState(average, kept.seen, correction=kept.correction), cost
        moved = axpy(x, -lr, average)
        new = cast_like(upper_set.for_round(turn.round_key).project(moved), x)
        seen = by_difference(state.seen, x, new, lr)
        return new, UpperState(average, seen), turn.upper_cost(1)
