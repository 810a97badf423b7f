"""Projected stochastic gradient descent: AiPOD's lower level."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import round_keys
from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel, is_random
from aipod.slots._asking import lower_oracle
from aipod.slots._cost import Cost
from aipod.slots._facing import Facing, nothing_faced, on_face
from aipod.slots._proxskip import step_keys
from aipod.slots._settling import Met
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import Curvature, StepSize, Tempering, check_lr, check_steps, one_of


class ProjectedState(eqx.Module):
    """On a set with bounds which of them are active; and how far steps are shortened in noise."""

    facing: Facing | None = None
    tempering: Tempering | None = None


class ProjectedSGD(AbstractLower):
    """S projected stochastic gradient steps (`update-ys`).

        y <- project(y - beta grad_y g(x, y; phi), x)

    On a set with bounds the way of the projections, over beta, gives their multipliers in the mean.

    **Arguments:**

    - `lr` [beta]: the step size.
    - `steps` [S]: steps per outer step, each on a fresh sample.

    !!! example
        ```python
        lower = aipod.ProjectedSGD(lr=0.01, steps=5)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")

    @property
    def draws(self) -> int:
        return self.steps

    def common(self, problem: Bilevel) -> bool:
        return True

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        facing = nothing_faced(problem.lower_set, x, y, corrected=False)
        return ProjectedState(facing, Tempering.first(self.lr, problem.lower_set, y))

    def own(self, state: PyTree) -> PyTree:
        # y is projected in every step, so all clients meet the same bounds.
        return jax.tree.map(lambda _: False, state)

    def faced(self, problem: Bilevel, state: PyTree) -> Bilevel:
        return on_face(problem, state.facing)

    def share(self, state: PyTree) -> Array | float:
        return 1.0 if state.tempering is None else state.tempering.share

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lr, lower_set, facing = turn.lr(self.lr), turn.lower_set, state.facing
        tempering = state.tempering
        if tempering is not None:
            lr = lr * tempering.share
        gradient = lower_oracle(turn, self.steps)

        def bounded(
            carry: tuple[PyTree, ...], keys: tuple[PRNGKeyArray, PRNGKeyArray]
        ) -> tuple[Any, None]:
            point, total, memory = carry
            draw_key, round_key = keys
            slope, memory = gradient(point, draw_key, memory)
            landed, met = lower_set.for_round(round_key).land(axpy(point, -lr, slope))
            return (cast_like(landed, point), axpy(total, 1 / lr, met), memory), None

        def body(
            carry: tuple[PyTree, Any], keys: tuple[PRNGKeyArray, PRNGKeyArray]
        ) -> tuple[Any, None]:
            point, memory = carry
            draw_key, round_key = keys
            slope, memory = gradient(point, draw_key, memory)
            moved = axpy(point, -lr, slope)
            return (cast_like(lower_set.for_round(round_key).project(moved), point), memory), None

        # The samples' keys are those of ProxSkip, which with p = 1 then sees the same samples.
        keys = (step_keys(turn.key, self.steps)[1], round_keys(turn.key, self.steps))
        if facing is None:
            (y, memory), _ = jax.lax.scan(body, (turn.y, turn.memory), keys)
        else:
            start = (turn.y, optax.tree.zeros_like(facing.multipliers), turn.memory)
            (y, met, memory), _ = jax.lax.scan(bounded, start, keys)
            steps = jnp.asarray(self.steps)
            facing = facing.after(turn, y, Met(met), self.steps, lr=lr, steps=steps)
        if tempering is not None and is_random(turn.problem.lower_samples):
            points = one_of(lower_set, turn.y), one_of(lower_set, y)
            tempering = tempering.after(
                *points, step=turn.step, paced=turn.moves is not None, uneven=turn.rates.uneven
            )
        cost = turn.lower_cost(self.steps, lower_draws=self.steps, memory=memory)
        return y, ProjectedState(facing, tempering), cost
