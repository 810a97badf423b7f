"""SimFBO's step on x, which is found together with those on y and z."""

from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, scaled
from aipod.problem import Bilevel, draw
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import AbstractUpper, check_moves, optimizer_step
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_direction,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize, check_lr, check_steps


class ToldUpper(AbstractUpper):
    """One step of the server.

        x <- x - gamma_x q_x

    with the q_x that the adjoint slot, such as `JointSteps`, found in tau local steps of all three
    variables.

    **Arguments:**

    - `lr` [eta_x]: the size of the local steps.
    - `steps` [tau]: how many there are.
    - `server_lr` [gamma_x]: that of the server's step; by default eta_x.
    - `optimizer`: an `optax.GradientTransformation` of q_x / tau in place of it.
    - `delta`: that of `PenalisedSteps`, for methods without a second derivative.

    !!! example
        ```python
        upper = ToldUpper(lr=0.01, steps=5)
        ```
    """

    lr: StepSize | None = None
    steps: int = eqx.field(static=True, default=1)
    server_lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None
    delta: StepSize | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "local_steps (tau)")
        check_moves(self.lr, self.optimizer)
        if self.server_lr is not None:
            check_lr(self.server_lr, "upper_server_lr")
        if self.optimizer is None and self.lr is None and self.server_lr is None:
            raise ValueError("give upper_lr, or an optimiser as upper_optimizer=.")
        if self.optimizer is not None and self.server_lr is not None:
            raise ValueError("give either upper_server_lr or upper_optimizer, one of the two.")

    @property
    def needs_implicit(self) -> bool:
        # For what a move of `paced_adam` promised, alone.
        return self.needs_moves and self.delta is None

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        own = None if self.optimizer is None else self.optimizer.init(x)
        return UpperState(own, nothing_seen(problem, x))

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        x, q = turn.x, turn.told.x
        along = optax.tree.scale(1 / self.steps, q)
        if self.optimizer is None:
            rate = turn.lr(self.lr if self.server_lr is None else self.server_lr)
            seen = by_direction(state.seen, along, rate * self.steps)
            return axpy(x, -rate, q), UpperState(None, seen), turn.upper_cost(1)
        extra = int(self.needs_moves)
        if extra and self.delta is not None:
            implicit = self._difference(turn, z)
        new, own = optimizer_step(turn, self.optimizer, along, state.own, implicit, batch)
        seen = by_optimizer(state.seen, turn.problem.upper_set, along, x, new)
        below = 0 if self.delta is None else extra
        cost = turn.upper_cost(2, rounds=1, upper_draws=extra, lower_draws=below)
        return new, UpperState(own, seen), cost

    def _difference(self, turn: Turn, z: PyTree) -> PyTree:
        """w = -grad_xy g z by a difference of first derivatives, at y and at y - delta z."""
        lower, delta = turn.problem.lower, turn.lr(self.delta)
        batch = draw(turn.problem.lower_samples, turn.keys(1)[0])
        ends = axpy(turn.y, -delta, z), turn.y
        there, here = (jax.grad(lower)(turn.x, end, batch) for end in ends)
        return scaled(1 / delta, optax.tree.sub(there, here))
