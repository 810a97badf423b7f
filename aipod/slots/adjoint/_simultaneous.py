"""SOBA's step on z."""

from typing import Any

import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel
from aipod.slots._asking import hessian_oracle, slope_oracle
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.stepsize import Curvature, StepSize, check_lr


class SimultaneousAdjoint(AbstractAdjoint):
    """One gradient step on the linear system of z that x sees one outer step later.

        z_next = z - rho (grad_yy g(x, y; phi) z - grad_y f(x, y; xi))

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

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        upper_key, lower_key = turn.sample_keys
        slope, memory = slope_oracle(turn)(upper_key, turn.memory)
        product, memory = hessian_oracle(turn)(state, lower_key, memory)
        new = axpy(state, -turn.lr(self.lr), optax.tree.sub(product, slope))
        # A shared batch of the upper level is the one that x sees.
        own = 0 if turn.shares_draws else 1
        return state, new, turn.lower_cost(lower_draws=1, upper_draws=own, memory=memory)
