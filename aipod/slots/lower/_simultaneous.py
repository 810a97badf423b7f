"""SOBA's slots: one step of everything, each from where all of them stood before."""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._neumann import AbstractAdjoint
from aipod.slots.lower._proxskip import AbstractLower
from aipod.stepsize._curvature import hessian_product
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate


class SimultaneousLower(AbstractLower):
    """One gradient step on y that the other slots see one outer step later.

        y_next = y - beta grad_y g(x, y; phi)

    The slot hands on y and keeps y_next, so that the adjoint and x move from the same (x, y) as y
    does. After K outer steps the y of the state is that of step K - 1.

    **Arguments:**

    - `lr` [beta]: the step size.

    !!! example
        ```python
        lower = aipod.SimultaneousLower(lr=0.1)
        ```
    """

    lr: StepSize = Curvature()

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return y

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, _, rates, key = turn
        gradient = jax.grad(problem.lower, argnums=1)(x, state, draw(problem.lower_samples, key))
        new = axpy(state, -rates(self.lr), gradient)
        return state, new, Cost(lower_samples=batch_size(problem.lower_samples))


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
        check_rate(self.lr, "adjoint_lr")

    @property
    def rate(self) -> StepSize:
        return self.lr

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return optax.tree.zeros_like(y)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        upper_key, lower_key = subkeys(key, 2)
        xi, phi = draw(problem.upper_samples, upper_key), draw(problem.lower_samples, lower_key)
        slope = jax.grad(problem.upper, argnums=1)(x, y, xi)
        product = hessian_product(lambda t: problem.lower(x, t, phi), y, state)
        new = axpy(state, -rates(self.lr), optax.tree.sub(product, slope))
        cost = Cost(
            upper_samples=batch_size(problem.upper_samples),
            lower_samples=batch_size(problem.lower_samples),
        )
        return state, new, cost
