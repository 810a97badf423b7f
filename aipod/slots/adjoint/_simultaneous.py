"""SOBA's step on z."""

from typing import Any

import optax
from jaxtyping import PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel, draw, grad_y_upper, hessian_product
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
    def deferred(self) -> bool:
        return True

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y = turn.problem, turn.x, turn.y
        upper_key, lower_key = subkeys(turn.key, 2)
        xi, phi = draw(problem.upper_samples, upper_key), draw(problem.lower_samples, lower_key)
        slope = grad_y_upper(problem, x, y, xi)
        product = hessian_product(lambda t: problem.lower(x, t, phi), y, state)
        left = problem.lower_set.riesz(optax.tree.sub(product, slope))
        projections, draws = settles(problem.lower_set), {"lower_draws": 1, "upper_draws": 1}
        cost = turn.lower_cost(projections, **draws, deferred=True)
        return state, axpy(state, -turn.lr(self.lr), left), cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        if not settles(turn.problem.lower_set):
            return state
        chosen = turn.problem.lower_set.directions().for_round(turn.round_key)
        return cast_like(chosen.project(state), state)
