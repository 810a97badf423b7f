"""SimFBO's step on y, which is found together with those on z and x."""

from jaxtyping import PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._facing import refuse_bounds
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.slots.lower._simultaneous import settles
from aipod.stepsize import Curvature, StepSize, check_lr


class ToldLower(AbstractLower):
    """y stays where it is, until the end of the outer step.

        y <- y - gamma_y q_y

    with the q_y that the adjoint slot, such as `JointSteps`, found in local steps of all variables.

    **Arguments:**

    - `lr` [eta_y]: the size of the local steps.
    - `server_lr` [gamma_y]: that of the server's step; by default eta_y.

    !!! example
        ```python
        lower = ToldLower(lr=0.1)
        ```
    """

    lr: StepSize = Curvature()
    server_lr: StepSize | None = None

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")
        if self.server_lr is not None:
            check_lr(self.server_lr, "lower_server_lr")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        refuse_bounds(problem, self)
        return None

    def common(self, problem: Bilevel) -> bool:
        return True

    @property
    def deferred(self) -> bool:
        return True

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        return turn.y, state, turn.lower_cost(settles(turn.problem.lower_set), deferred=True)

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        rate = turn.lr(self.lr if self.server_lr is None else self.server_lr)
        return axpy(turn.start, -rate, turn.told.y), state
