"""Exponentiated gradient: steps on a simplex that multiply instead of add."""

from typing import Any

import optax
from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import AbstractUpper, check_moves
from aipod.slots.upper._seen import Seen, UpperState, by_difference, nothing_seen
from aipod.stepsize import StepSize


class ExponentiatedGradient(AbstractUpper):
    """Every weight is multiplied by exp(-alpha (grad_x f + w)), and all of them by one number.

        x_i <- x_i exp(-alpha d_i) / c,   c such that the entries sum to the total

    Mirror descent with the entropy (Kivinen and Warmuth, 1997), for an upper set that is a
    `Simplex`, or a `Product` of such sets and `Free`, whose parts take plain steps. Entries come
    near 0 and are never exactly 0; an entry that starts at 0 stays there, so start inside.

    **Arguments:**

    - `lr` [alpha]: the step size, over the unit of f.

    !!! example
        ```python
        solver = aipod.Alternating(
            aipod.ProxSkip(), aipod.Neumann(20), aipod.ExponentiatedGradient(lr=0.5)
        )
        ```
    """

    lr: StepSize

    def __check_init__(self) -> None:
        check_moves(self.lr, None)

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        problem.upper_set.multiply(x, optax.tree.zeros_like(x))
        return UpperState(None, nothing_seen(problem, x, difference=True))

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        x, upper_set, lr = turn.x, turn.problem.upper_set, turn.lr(self.lr)
        direction = turn.direction(implicit, batch)
        new = cast_like(upper_set.multiply(x, optax.tree.scale(lr, direction)), x)
        # How stationary x is shows in a projected step, as elsewhere.
        landed = cast_like(upper_set.project(axpy(x, -lr, direction)), x)
        seen = by_difference(state.seen, x, landed, lr)
        return new, UpperState(None, seen), turn.upper_cost(1)
