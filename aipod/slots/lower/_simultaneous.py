"""SOBA's step on y."""

from jaxtyping import PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.sets import AbstractSet
from aipod.slots._asking import lower_oracle
from aipod.slots._cost import Cost
from aipod.slots._facing import refuse_bounds
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import Curvature, StepSize, check_lr


class SimultaneousLower(AbstractLower):
    """One gradient step on y that the other slots see one outer step later.

        y_next = y - beta grad_y g(x, y; phi)

    The slot hands on y and keeps y_next, so that the adjoint and x move from the same (x, y) as y
    does. After K outer steps the y of the state is that of step K - 1. y_next is
    projected at the end of the outer step; in gossip it is mixed with the neighbours (D-SOBA).

    **Arguments:**

    - `lr` [beta]: the step size.

    !!! example
        ```python
        lower = aipod.SimultaneousLower(lr=0.1)
        ```
    """

    lr: StepSize = Curvature()

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        refuse_bounds(problem, self)
        return y

    @property
    def single(self) -> bool:
        return True

    @property
    def deferred(self) -> bool:
        return True

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        # Where draws are not shared, the key is the slot's own.
        key = turn.sample_keys[1] if turn.shares_draws else turn.key
        gradient, memory = lower_oracle(turn)(state, key, turn.memory)
        moved = axpy(state, -turn.lr(self.lr), gradient)
        projections = settles(turn.problem.lower_set)
        return (
            state,
            moved,
            turn.lower_cost(projections, lower_draws=1, deferred=True, memory=memory),
        )

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        if not settles(turn.problem.lower_set):
            return turn.y, state
        chosen = turn.lower_set.for_round(turn.round_key)
        return turn.y, cast_like(chosen.project(state), state)


def settles(lower_set: AbstractSet) -> int:
    """1 where y and z end the outer step with a projection, else 0."""
    return int(lower_set.constrained)
