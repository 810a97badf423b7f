"""The adjoint of first-order penalty methods: a difference quotient of lower solutions."""

from typing import Any

import equinox as eqx
import optax
from jaxtyping import Array, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import cast_like
from aipod.problem import Bilevel, Constant, batch_size, draw
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.lower import AbstractLower
from aipod.stepsize import StepSize, check_positive


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
        check_positive(self.delta, "perturbation (delta)")

    @property
    def lr(self) -> StepSize:
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
        problem, x, y = turn.problem, turn.x, turn.y
        start, kept = state
        sample_key, key = subkeys(turn.key, 2)
        lower_batch = draw(problem.lower_samples, sample_key)
        perturbed = self._perturbed(problem, (upper_batch, lower_batch))
        inner = Turn(perturbed, x, start, turn.rates, key)
        moved, kept, cost = self.lower.run(inner, kept)
        # A slot that leaves its projection to the end of the outer step would leave y_delta off
        # the set, where the quotient means nothing.
        rounds = cost.rounds
        if self.lower.deferred:
            moved, kept = self.lower.settle(inner._replace(y=moved), kept)
            rounds = rounds + rounds_of(problem.lower_set, 1)
        z = optax.tree.scale(1 / self.delta, optax.tree.sub(y, moved))
        spent = Cost(
            cost.projections,
            upper_samples=cost.lower_samples * batch_size(problem.upper_samples),
            lower_samples=cost.lower_samples * batch_size(problem.lower_samples),
            rounds=rounds,
            sent_y=cost.sent_y,
        )
        return cast_like(z, y), (moved, kept), spent
