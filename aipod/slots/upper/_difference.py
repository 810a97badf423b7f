"""The upper level of first-order penalty methods: a difference of first derivatives."""

from typing import Any

import jax
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel, draw
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_moves,
    check_one_of,
    optimizer_step,
)
from aipod.slots.upper._mapping import first_length, mapped, next_length
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize, check_positive


class DifferenceStep(AbstractUpper):
    """One projected step along a hypergradient that is a difference of first derivatives.

        V(t, p) = d/dx g(x, t(x)) + p delta d/dx f(x_, t(x)),   t(x) moving as the set does
        x <- project_x(x - alpha (grad_x f(x, y) + (V(y - delta z, 1) - V(y, 0)) / delta))

    x_ is x held fixed. In place of -grad_xy g z + L' (grad_y f - grad_yy g z), to which it tends
    with delta; the multipliers of the constraint are eliminated as everywhere in this library.

    **Arguments:**

    - `lr` [alpha]: the step size; or
    - `optimizer`: an `optax.GradientTransformation`.
    - `delta`: the perturbation behind z.

    !!! example
        ```python
        upper = aipod.DifferenceStep(lr=0.1, delta=1e-3)
        ```
    """

    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None
    delta: float = 1e-2

    def __check_init__(self) -> None:
        check_moves(self.lr, self.optimizer)
        check_positive(self.delta, "perturbation (delta)")
        check_one_of(self.lr, self.optimizer)

    @property
    def needs_implicit(self) -> bool:
        return False

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        own = None if self.optimizer is None else self.optimizer.init(x)
        by_rounding = self.optimizer is None
        length = None if self.optimizer is None else first_length(problem, x)
        return UpperState(own, nothing_seen(problem, x, difference=by_rounding), length=length)

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def needs_each(self, state: PyTree) -> bool:
        return False

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y = turn.problem, turn.x, turn.y
        lower_batch = draw(problem.lower_samples, turn.keys(1)[0])

        def value(moving: PyTree, point: PyTree, share: float) -> Array:
            followed = problem.lower_set.follow(point, moving)
            total = problem.lower(moving, followed, lower_batch)
            if share and problem.lower_set.coupled:
                total = total + self.delta * problem.upper(x, followed, batch)
            return total

        there = jax.grad(value)(x, axpy(y, -self.delta, z), 1.0)
        here = jax.grad(value)(x, y, 0.0)
        through = optax.tree.scale(1 / self.delta, optax.tree.sub(there, here))
        direction = turn.direction(through, batch)
        upper_set = problem.upper_set.for_round(turn.round_key)
        if self.optimizer is not None:
            along, length = mapped(upper_set, x, direction, state.length)
            new, own = optimizer_step(turn, self.optimizer, along, state.own, through, batch)
            seen = by_optimizer(state.seen, problem.upper_set, along, x, new)
            kept = UpperState(own, seen, length=next_length(length, along, x, new))
            return new, kept, turn.upper_cost(2, rounds=1, lower_draws=1)
        lr = turn.lr(self.lr)
        new = cast_like(upper_set.project(axpy(x, -lr, direction)), x)
        seen = by_difference(state.seen, x, new, lr)
        return new, UpperState(None, seen), turn.upper_cost(1, lower_draws=1)
