"""One projected step: the upper level of AiPOD."""

from typing import Any

import equinox as eqx
import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._compression import check_compression, rounds_both_ways, told
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_moves,
    check_one_of,
    optimizer_step,
)
from aipod.slots.upper._gossip import first_alone, next_alone
from aipod.slots.upper._mapping import first_length, mapped, next_length
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    by_direction,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize


class EveryStep(AbstractUpper):
    """One step, projected every time, as AiPOD does.

        x <- project_x(x - alpha (grad_x f + w))

    With `optimizer`, any Optax transformation u of the projected gradient instead:
    x <- project_x(x + u(P_x (grad_x f + w))). On a set with bounds the gradient mapping takes the
    place of P_x (grad_x f + w).

    **Arguments:**

    - `lr` [alpha]: the step size; or
    - `optimizer`: an `optax.GradientTransformation`.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, "float8" for 8 and "float4"
        for 4 in both directions.
    - `corrected`: in gossip (`aipod.Gossip`), whether a plain step is corrected for what one
        exchange with the neighbours leaves out (exact diffusion). Without it x is moved by
        decentralised SGD, and where clients differ it stops near a solution. An optimiser always
        gets a tracked gradient.

    !!! example
        ```python
        upper = aipod.EveryStep(optimizer=optax.adam(1e-3))
        ```
    """

    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None
    compression: str | None = eqx.field(static=True, default=None)
    corrected: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_moves(self.lr, self.optimizer)
        check_compression(self.compression)
        check_one_of(self.lr, self.optimizer)

    @property
    def sends_direction(self) -> bool:
        return not self.needs_moves

    @property
    def wire(self) -> str | None:
        return self.compression

    def wire_back(self, problem: Bilevel) -> str | None:
        # With bounds, what clients hear is projected by each of them.
        both = rounds_both_ways(self.compression) and problem.upper_set.affine
        return self.compression if both else None

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        if problem.upper_set.apart:
            return first_alone(problem, self.optimizer, x)
        own = None if self.optimizer is None else self.optimizer.init(x)
        known = None if self.compression is None else optax.tree.zeros_like(x)
        difference = self.optimizer is None and problem.upper_set.constrained
        length = None if self.optimizer is None else first_length(problem, x)
        seen = nothing_seen(problem, x, difference=difference)
        heard = None if self.wire_back(problem) is None else optax.tree.zeros_like(x)
        return UpperState(own, seen, known, length=length, heard=heard)

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    @property
    def needs_each(self) -> bool:
        return self.compression is not None

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        if turn.problem.upper_set.apart:
            slope = turn.direction(implicit, batch)
            how = (turn, self.lr, self.optimizer, self.corrected)
            return next_alone(*how, slope, implicit, batch, state)
        direction, known = turn.direction(implicit, batch), state.known
        if self.compression is not None:
            direction = known = told(direction, known, self.compression)
        x, upper_set = turn.x, turn.problem.upper_set.for_round(turn.round_key)
        heard = state.heard
        if heard is not None and self.compression is not None:
            # The server has the mean; the clients go on from what they hear of it.
            direction = heard = told(upper_set.tangent(direction), heard, self.compression)
        if self.optimizer is not None:
            along, length = cast_like(direction, x), None
            if heard is None:
                along, length = mapped(upper_set, x, direction, state.length)
            new, own = optimizer_step(turn, self.optimizer, along, state.own, implicit, batch)
            seen = by_optimizer(state.seen, turn.problem.upper_set, along, x, new)
            # x + u agrees between clients as P g does: the second projection sends nothing.
            length = next_length(length, along, x, new)
            kept = UpperState(own, seen, known, length=length, heard=heard)
            return new, kept, turn.upper_cost(2, rounds=1)
        lr = turn.lr(self.lr)
        new = cast_like(upper_set.project(axpy(x, -lr, direction)), x)
        if turn.problem.upper_set.constrained:
            seen = by_difference(state.seen, x, new, lr)
        else:
            seen = by_direction(state.seen, direction, lr)
        return new, UpperState(None, seen, known, heard=heard), turn.upper_cost(1)
