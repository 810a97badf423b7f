"""The first-order penalty method's slots: the hypergradient as a difference of gradients."""

from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, PyTree

from aipod._hypergradient._exact import upper_gradient
from aipod._misc.tree import axpy, cast_like
from aipod.problem._bilevel import Bilevel, Constant
from aipod.problem._samplers import batch_size, draw
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.adjoint._neumann import AbstractAdjoint
from aipod.slots.lower._proxskip import AbstractLower
from aipod.slots.upper._every import AbstractUpper, check_one_of, check_upper_rate, optimizer_step
from aipod.stepsize._stepsize import StepSize, check_rate


class _Penalised(eqx.Module):
    """g + delta f, for a batch of each."""

    problem: Bilevel
    delta: Array | float

    def __call__(self, x: PyTree, y: PyTree, batches: Any) -> Array:
        upper_batch, lower_batch = batches
        share = self.delta * self.problem.upper(x, y, upper_batch)
        return self.problem.lower(x, y, lower_batch) + share


class PerturbedLower(AbstractAdjoint):
    """z as a difference quotient: the lower level is solved once more, with a little of f in it.

        y_delta = argmin over the lower set of g(x, .) + delta f(x, .),   z = (y - y_delta) / delta

    which tends to (P G P)^+ P grad_y f as delta does to 0, without a second derivative.

    **Arguments:**

    - `lower`: the slot that solves the perturbed level.
    - `delta`: the perturbation.

    !!! example
        ```python
        adjoint = aipod.PerturbedLower(aipod.AugmentedLagrangian(tolerance=1e-6), delta=1e-3)
        ```
    """

    lower: AbstractLower
    delta: float = 1e-2

    def __check_init__(self) -> None:
        check_rate(self.delta, "perturbation (delta)")

    @property
    def rate(self) -> StepSize:
        return self.lower.lr

    def _perturbed(self, problem: Bilevel, batches: Any) -> Bilevel:
        return Bilevel(
            problem.upper,
            _Penalised(problem, self.delta),
            problem.upper_set,
            problem.lower_set,
            problem.upper_samples,
            Constant(batches),
        )

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return y, self.lower.init(problem, x, y)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        start, kept = state
        lower_batch = draw(problem.lower_samples, key)
        perturbed = self._perturbed(problem, (upper_batch, lower_batch))
        moved, kept, cost = self.lower.run(Turn(perturbed, x, start, rates, key), kept)
        z = optax.tree.scale(1 / self.delta, optax.tree.sub(y, moved))
        spent = Cost(
            cost.projections,
            upper_samples=cost.lower_samples * batch_size(problem.upper_samples),
            lower_samples=cost.lower_samples * batch_size(problem.lower_samples),
            rounds=cost.rounds,
            sent_y=cost.sent_y,
        )
        return cast_like(z, y), (moved, kept), spent


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
        check_upper_rate(self.lr)
        check_rate(self.delta, "perturbation (delta)")
        check_one_of(self.lr, self.optimizer)

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        lower_batch = draw(problem.lower_samples, key)

        def value(moving: PyTree, point: PyTree, share: float) -> Array:
            followed = problem.lower_set.follow(point, moving)
            total = problem.lower(moving, followed, lower_batch)
            if share and problem.lower_set.coupled:
                total = total + self.delta * problem.upper(x, followed, batch)
            return total

        there = jax.grad(value)(x, axpy(y, -self.delta, z), 1.0)
        here = jax.grad(value)(x, y, 0.0)
        through = optax.tree.scale(1 / self.delta, optax.tree.sub(there, here))
        direction = optax.tree.add(upper_gradient(problem, x, y, batch), through)
        direction = problem.upper_set.riesz(direction)
        upper_set = problem.upper_set.for_round(key)
        rounds = rounds_of(problem.upper_set, 1)
        spent = batch_size(problem.lower_samples)
        cost = Cost(1, lower_samples=spent, rounds=rounds, sent_x=rounds)
        if self.optimizer is not None:
            along = cast_like(upper_set.tangent(direction), x)
            x, state = optimizer_step(problem, self.optimizer, along, state, x)
            return x, state, cost
        moved = upper_set.project(axpy(x, -rates(self.lr), direction))
        return cast_like(moved, x), state, cost
