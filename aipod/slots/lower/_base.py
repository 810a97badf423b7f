"""What every lower slot answers."""

import abc
from typing import TYPE_CHECKING

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._facing import refuse_bounds
from aipod.slots._turn import Turn
from aipod.stepsize import StepSize


class AbstractLower(eqx.Module):
    """The slot that moves y towards y*(x) while x is fixed.

    A subclass must have a field `lr` and answer `run`. It may answer the rest: `init` when it keeps
    something from one outer step to the next, `draws` when it wants the features of a `Composite`
    computed once, `deferred` and `settle` when its projection waits for the end of the outer step,
    `faced` when it takes sets with bounds, `own` when only a part of its state belongs to a client.

    !!! example
        ```python
        class OneStep(aipod.AbstractLower):
            lr: float = 0.1

            def run(self, turn, state):
                slope = turn.lower_gradient()(turn.y, turn.key)
                y = turn.lower_set.project(turn.y - turn.lr(self.lr) * slope)
                return y, state, turn.lower_cost(1, lower_draws=1)


        solver = aipod.Alternating(OneStep(), aipod.Neumann(), aipod.EveryStep(lr=0.1))
        ```
    """

    # A property to type checkers, which would otherwise make it the first argument of subclasses.
    if TYPE_CHECKING:

        @property
        def lr(self) -> StepSize: ...

    else:
        lr: eqx.AbstractVar[StepSize]

    @abc.abstractmethod
    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        """The next y, the next state, and what it cost."""

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """The state before the first outer step: what is kept besides y.

        Only shapes and types may be read from the problem, x and y: over a network the server
        calls this without any data.
        """
        refuse_bounds(problem, self)
        return None

    def faced(self, problem: Bilevel, state: PyTree) -> Bilevel:
        """The problem as the rest of the outer step sees it, with a lower set that is affine.

        Where the lower set has bounds, that is its active face, which the slot has decided on.
        """
        refuse_bounds(problem, self)
        return problem

    def seen_from(self, faced: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """The y at which the adjoint and the hypergradient are found; `faced` as above."""
        return y

    @property
    def draws(self) -> int:
        """Batches of the lower level that one outer step draws; 0 where that is not known."""
        return 0

    @property
    def single(self) -> bool:
        """Whether an outer step asks for exactly one gradient, where that is known."""
        return False

    @property
    def deferred(self) -> bool:
        """Whether the projection is left to `settle`, at the end of the outer step."""
        return False

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        """y and the state after the projection that was left to the end of the outer step."""
        return turn.y, state

    def common(self, problem: Bilevel) -> bool:
        """Whether all clients have the same y when an outer step is over; it is then kept once."""
        return False

    def share(self, state: PyTree) -> Array | float:
        """The share of its step size that the slot takes; less than 1 where noise has told it to.

        What a run says of its convergence depends on it: shorter steps follow x less quickly.
        """
        return 1.0

    def ran_away(self, state: PyTree) -> Array | None:
        """Whether the local steps just made grew as steps do that are too long.

        None where the slot does not tell. Of a large federation whose slot tells, the curvature is
        looked at in fewer outer steps.
        """
        return None

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    def own(self, state: PyTree) -> PyTree:
        """For each leaf of the state whether it belongs to one client; else all have the same.

        By default all of it belongs to the client.
        """
        return jax.tree.map(lambda _: True, state)
