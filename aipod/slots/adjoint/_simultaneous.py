"""SOBA's step on z."""

from typing import Any

import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._asking import hessian_oracle, slope_oracle
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.lower import settles
from aipod.stepsize import Curvature, StepSize, check_lr


class SimultaneousAdjoint(AbstractAdjoint):
    """One gradient step on the linear system of z that x sees one outer step later.

        z_next = z - rho (grad_yy g(x, y; phi) z - grad_y f(x, y; xi))

    z_next is projected at the end of the outer step, where there are constraints.

    **Arguments:**

    - `lr` [rho]: the step size.

    !!! example
        ```python
        adjoint = aipod.SimultaneousAdjoint(lr=0.1)
        ```
    """

    lr: StepSize = Curvature()

    def __check_init__(self) -> None:
        check_lr(self.lr, "adjoint_lr")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return optax.tree.zeros_like(y)

    @property
    def single(self) -> bool:
        return True

    @property
    def deferred(self) -> bool:
        return True

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        upper_key, lower_key = turn.sample_keys
        slope, memory = slope_oracle(turn)(upper_key, turn.memory)
        product, memory = hessian_oracle(turn)(state, lower_key, memory)
        new = axpy(state, -turn.lr(self.lr), optax.tree.sub(product, slope))
        cost = turn.lower_cost(
            settles(turn.problem.lower_set),
            lower_draws=1,
            # A shared batch of the upper level is the one that x sees.
            upper_draws=0 if turn.shares_draws else 1,
            deferred=True,
            memory=memory,
        )
        return state, new, cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        if not settles(turn.problem.lower_set):
            return state
        chosen = turn.problem.lower_set.directions().for_round(turn.round_key)
        return cast_like(chosen.project(state), state)
