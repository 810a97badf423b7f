"""The method of multipliers: the lower level to a tolerance, without projections."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel, draw
from aipod.slots._cost import Cost
from aipod.slots._facing import refuse_bounds
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import (
    Curvature,
    StepSize,
    check_lr,
    check_positive,
    check_steps,
    power_iteration,
)

# Enough for the norm of a constraint matrix; it is found once, when a run begins.
_NORM_ITERATIONS = 100
# A little below 1 / L, since power iterations come to L from below.
_SAFETY = 0.9


class _State(eqx.Module):
    """The multipliers, and ||A||^2."""

    multipliers: PyTree
    norm: Array


class AugmentedLagrangian(AbstractLower):
    """The lower level solved to a tolerance by the method of multipliers, without projections.

        y <- y - s grad_y L(y),   L(y) = g(x, y) + <m, r(y)> + sigma / 2 ||r(y)||^2
        until ||grad_y L|| <= max(tolerance, ||r(y)||),   then   m <- m + sigma r(y)

    with r(y) = A y + h(x) - c, over and over until both ||grad_y L|| and ||r|| are at most the
    tolerance. s = 0.9 / (1 / beta + sigma ||A||^2); y and m are carried over to the next step.

    **Arguments:**

    - `lr` [beta]: 1 / l_g1, a step that the objective g alone would take.
    - `penalty` [sigma]: the weight of the constraint.
    - `tolerance`: how small the gradient and the residual must be.
    - `steps`: at most so many gradient steps per outer step.

    !!! example
        ```python
        lower = aipod.AugmentedLagrangian(penalty=10.0, tolerance=1e-6)
        ```
    """

    lr: StepSize = Curvature()
    penalty: float = 10.0
    tolerance: float = 1e-6
    steps: int = eqx.field(static=True, default=10_000)

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")
        check_positive(self.penalty, "penalty (sigma)")
        check_positive(self.tolerance, "tolerance")
        check_steps(self.steps, "lower_steps")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        if problem.lower_set.federated:
            raise ValueError(
                "lower_set crosses clients, for which an augmented Lagrangian would communicate in "
                "every gradient step: use aipod.EAiPOD."
            )
        refuse_bounds(problem, self)
        residual, pull = jax.vjp(lambda y: problem.lower_set.residual(y, x), y)
        push = jax.linearize(lambda y: problem.lower_set.residual(y, x), y)[1]
        start = optax.tree.random_like(jax.random.key(0), y, jax.random.normal)
        norm, _ = power_iteration(lambda v: pull(push(v))[0], start, _NORM_ITERATIONS)
        return _State(optax.tree.zeros_like(residual), norm)

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y = turn.problem, turn.x, turn.y
        batch = draw(problem.lower_samples, turn.key)
        lower_set = turn.lower_set
        length = _SAFETY / (1 / turn.lr(self.lr) + self.penalty * state.norm)

        def residual(point: PyTree) -> PyTree:
            return lower_set.residual(point, x)

        def slope(point: PyTree, multipliers: PyTree) -> PyTree:
            def lagrangian(point: PyTree) -> Array:
                broken = residual(point)
                along = optax.tree.vdot(multipliers, broken)
                size = optax.tree.vdot(broken, broken)
                return problem.lower(x, point, batch) + along + self.penalty / 2 * size

            return jax.grad(lagrangian)(point)

        def descend(carry: tuple) -> tuple:
            point, multipliers, gradient, count = carry
            point = axpy(point, -length, gradient)
            return point, multipliers, slope(point, multipliers), count + 1

        def steep(carry: tuple) -> Array:
            point, _, gradient, count = carry
            enough = jnp.maximum(self.tolerance, optax.tree.norm(residual(point)))
            return (optax.tree.norm(gradient) > enough) & (count < self.steps)

        def unsolved(carry: tuple) -> Array:
            point, _, gradient, count = carry
            error = jnp.maximum(optax.tree.norm(residual(point)), optax.tree.norm(gradient))
            return (error > self.tolerance) & (count < self.steps)

        def multiply(carry: tuple) -> tuple:
            point, multipliers, _, count = jax.lax.while_loop(steep, descend, carry)
            multipliers = axpy(multipliers, self.penalty, residual(point))
            return point, multipliers, slope(point, multipliers), count + 1

        zero = jnp.zeros((), jnp.int32)
        start = (y, state.multipliers, slope(y, state.multipliers), zero)
        y, multipliers, _, count = jax.lax.while_loop(unsolved, multiply, start)
        return y, _State(multipliers, state.norm), turn.lower_cost(lower_draws=count + 1)
