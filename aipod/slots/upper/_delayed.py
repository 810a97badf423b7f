"""Several steps, then one projection: the upper level of E-AiPOD."""

from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_between,
    check_moves,
    optimizer_step,
    step_between,
)
from aipod.slots.upper._gossip import first_alone, next_alone
from aipod.slots.upper._mapping import first_length, mapped, next_length
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize, check_at_least_one, check_steps


class Delayed(AbstractUpper):
    """T steps with one w and no projection, then one projection scaled by delta (E-AiPOD).

        x_{t+1} = x_t - alpha (grad_x f(x_t, y; xi_t) + w),   t = 0..T-1   (`update-xkt`, `NS-hf-t`)
        x <- (1 - delta) x + delta project_x(x_T)                                       (`delta-x`)

    With `optimizer` the last line is that transformation's step on the pseudo-gradient
    x - project_x(x_T), of which delta is the special case `optax.sgd(delta)`.

    On an upper set with bounds the point that delta leads to is projected once more. With T > 1 the
    objective f is evaluated a little outside the bounds, and x ends O(alpha T) off, as with
    equalities.

    **Arguments:**

    - `steps` [T]: unprojected steps.
    - `delta` [delta]: the extrapolation, at least 1; the paper's choice is 1 or sqrt(T).
    - `lr` [alpha]: the size of the T steps; may be left out with an optimiser where T = 1, and with
        `aipod.paced_adam()`, whose last move they then share.
    - `optimizer`: an `optax.GradientTransformation` in place of delta.

    !!! example
        ```python
        upper = aipod.Delayed(steps=4, delta=2.0, lr=0.01)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    delta: float = 1.0
    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (T)")
        check_moves(self.lr, self.optimizer)
        check_at_least_one(self.delta, "extrapolation (delta)")
        if self.lr is None and self.optimizer is None:
            raise ValueError("give upper_lr, or an optimiser as upper_optimizer=.")
        check_between(self.lr, self.optimizer, self.steps)
        if self.optimizer is not None and self.delta != 1:
            raise ValueError(
                "extrapolation and upper_optimizer both say how far to go after the projection: "
                "give one of the two (extrapolation is optax.sgd(extrapolation)); extrapolation "
                "needs upper_lr."
            )

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        if problem.upper_set.apart and self.optimizer is not None:
            if self.steps > 1 or self.lr is not None:
                raise ValueError(
                    "in gossip upper_optimizer moves x once in an outer step, by a tracked "
                    "gradient: set upper_steps=1 and leave upper_lr out, or leave the optimiser "
                    "out."
                )
            return first_alone(problem, self.optimizer, x)
        own = None if self.optimizer is None else self.optimizer.init(x)
        return UpperState(
            own, nothing_seen(problem, x, difference=True), length=self._length(problem, x)
        )

    def _length(self, problem: Bilevel, x: PyTree) -> Array | None:
        """With a step size the T steps themselves give the gradient mapping."""
        return first_length(problem, x) if self.lr is None else None

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def needs_each(self, state: PyTree) -> bool:
        return self.steps > 1

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x = turn.problem, turn.x
        if problem.upper_set.apart and self.optimizer is not None:
            slope = turn.direction(implicit, batch)
            how = (turn, None, self.optimizer, True)
            return next_alone(*how, slope, implicit, batch, state)
        lr = step_between(turn, self.lr, self.steps, implicit, batch)

        def body(carry: tuple[PyTree, Any], draw_key: PRNGKeyArray) -> tuple[Any, None]:
            total, memory = carry
            moved = axpy(x, -lr, total)
            slope, memory = turn.direction_oracle(implicit, moved, draw_key, memory)
            return (optax.tree.add(total, slope), memory), None

        # xi_0 is the sample of w, as in AiPOD; the later steps draw their own.
        total, memory = turn.direction(implicit, batch), turn.memory
        if self.steps > 1:
            (total, memory), _ = jax.lax.scan(body, (total, memory), turn.keys(self.steps)[1:])
        upper_set = problem.upper_set.for_round(turn.round_key)
        draws = self.steps - 1
        if self.lr is None and self.optimizer is not None:
            mean = optax.tree.scale(1 / self.steps, total)
            along, length = mapped(upper_set, x, mean, state.length)
            new, own = optimizer_step(turn, self.optimizer, along, state.own, implicit, batch)
            seen = by_optimizer(state.seen, problem.upper_set, along, x, new)
            kept = UpperState(own, seen, length=next_length(length, along, x, new))
            return new, kept, turn.upper_cost(2, rounds=1, upper_draws=draws, memory=memory)
        landed = cast_like(upper_set.project(axpy(x, -lr, total)), x)
        length = lr * self.steps
        if self.optimizer is not None:
            along = optax.tree.sub(x, landed)
            new, own = optimizer_step(turn, self.optimizer, along, state.own, implicit, batch)
            seen = by_optimizer(state.seen, problem.upper_set, along, x, new, length)
            return (
                new,
                UpperState(own, seen),
                turn.upper_cost(2, rounds=1, upper_draws=draws, memory=memory),
            )
        cost = turn.upper_cost(1, upper_draws=draws, memory=memory)
        seen = by_difference(state.seen, x, landed, length)
        if isinstance(self.delta, float | int) and self.delta == 1:
            return landed, UpperState(None, seen), cost
        if not problem.upper_set.affine:
            # Beyond the landing point x may be out of the set. A second projection brings it back,
            # and keeps the fixed points.
            further = axpy(x, self.delta, optax.tree.sub(landed, x))
            new = cast_like(upper_set.alone(further), x)
            return (
                new,
                UpperState(None, seen),
                turn.upper_cost(2, rounds=1, upper_draws=draws, memory=memory),
            )
        # The difference lies in the tangent space but for rounding. Left as it is, every step would
        # multiply the error off the set by 1 - delta: for delta above 2 a long run ends in NaN.
        along = optax.tree.sub(landed, x)
        if not problem.upper_set.apart:
            along = problem.upper_set.tangent(along)
        return axpy(x, self.delta, along), UpperState(None, seen), cost
