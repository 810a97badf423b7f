"""F2SA's local steps: two minimisers below and x at once, by first derivatives alone."""

from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, scaled
from aipod.problem import Bilevel, draw, grad_x_upper, grad_y_upper
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._joint import (
    AbstractJoint,
    JointState,
    Sums,
    check_joint,
    first_joint,
    local_rates,
    local_sums,
)
from aipod.slots.lower import settles
from aipod.stepsize import Curvature, StepSize, check_lr


class PenalisedSteps(AbstractJoint):
    """tau local steps on y, u and x at once, without a second derivative (F2SA).

        y_i <- y_i - eta_y grad_y g_i(x_i, y_i; phi)
        u_i <- u_i - eta_u (grad_y g_i(x_i, u_i; phi) + delta grad_y f_i(x_i, u_i; xi'))
        x_i <- x_i - eta_x (grad_x f_i(x_i, u_i; xi)
                            + (grad_x g_i(x_i, u_i; phi') - grad_x g_i(x_i, y_i; phi')) / delta)

    and at the end of the outer step u <- u - gamma_u q_u, with q as in `JointSteps`. The adjoint is
    z = (y - u) / delta. Noise of y and u is divided by delta; on the same batches much of it
    cancels.

    **Arguments:**

    - `steps` [tau]: local steps.
    - `lr` [eta_u], `lower_lr` [eta_y], `upper_lr` [eta_x]: their sizes; `upper_lr=None` keeps x
        fixed in them.
    - `server_lr` [gamma_u]: the server's step on u; by default eta_u.
    - `delta`: how much of f is mixed into g, a number or an Optax schedule.

    !!! example
        ```python
        adjoint = PenalisedSteps(steps=5, lr=0.1, lower_lr=0.1, upper_lr=0.01, delta=0.05)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    lr: StepSize = Curvature()
    lower_lr: StepSize = Curvature()
    upper_lr: StepSize | None = None
    server_lr: StepSize | None = None
    delta: StepSize = 0.05

    def __check_init__(self) -> None:
        check_joint(self.steps, self.lr, self.server_lr)
        check_lr(self.delta, "perturbation (delta)")
        if isinstance(self.delta, Curvature):
            raise ValueError(
                "perturbation (delta) cannot be aipod.Curvature(), which is a step size: give a "
                "number or an Optax schedule."
            )

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return first_joint(y, x)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        delta = turn.lr(self.delta)

        def directions(problem: Bilevel, point: Sums, key: PRNGKeyArray) -> Sums:
            return _directions(problem, point, key, delta)

        rates = local_rates(turn, self.lower_lr, self.lr, self.upper_lr)
        q = local_sums(turn, Sums(turn.y, state.z, turn.x), rates, self.steps, directions)
        # One batch of the upper level is counted for every outer step already.
        cost = turn.lower_cost(
            settles(turn.problem.lower_set),
            lower_draws=2 * self.steps,
            upper_draws=2 * self.steps - 1,
            deferred=True,
        )
        z = scaled(1 / delta, optax.tree.sub(turn.y, state.z))
        return jax.tree.map(lambda a, b: a.astype(b.dtype), z, turn.y), JointState(state.z, q), cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        rate = turn.lr(self.lr if self.server_lr is None else self.server_lr)
        return JointState(axpy(state.z, -rate, state.q.z), state.q)


def _directions(problem: Bilevel, point: Sums, key: PRNGKeyArray, delta: Array) -> Sums:
    """Of one client's local step; y and u on the same batch of g, and so is x at both."""
    y, u, x = point
    keys = subkeys(key, 4)
    below, beside = (draw(problem.lower_samples, k) for k in keys[:2])
    mixed, direct = (draw(problem.upper_samples, k) for k in keys[2:])
    slope_y, slope_u = (jax.grad(problem.lower, argnums=1)(x, t, below) for t in (y, u))
    slope_u = axpy(slope_u, delta, grad_y_upper(problem, x, u, mixed))
    at_y, at_u = (jax.grad(problem.lower)(x, t, beside) for t in (y, u))
    along = axpy(grad_x_upper(problem, x, u, direct), 1 / delta, optax.tree.sub(at_u, at_y))
    riesz = problem.lower_set.riesz
    return Sums(riesz(slope_y), riesz(slope_u), problem.upper_set.riesz(along))
