"""What every adjoint slot answers."""

import abc
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._health import Health
from aipod.stepsize import StepSize


class AbstractAdjoint(eqx.Module):
    """The slot that finds z = (P G P)^+ P grad_y f, with G = grad_yy g and P onto Ker A.

    z is the paper's V2 (V2' G V2)^-1 V2' grad_y f without the basis V2: the vector of Ker A with
    P G z = P grad_y f.

    A subclass must answer `solve`. It may answer the rest: `lr` when it has a step size, `init`
    when it keeps something from one outer step to the next, `draws` when it wants the features of
    a `Composite` computed once, `deferred` and `settle` when a projection waits for the end of the
    outer step, `own` when a part of its state belongs to a client, `health` when it knows how far
    the system was solved, `failed` when a solve can break down.

    !!! example
        ```python
        class Scaled(aipod.AbstractAdjoint):
            lr: float = 0.1

            def solve(self, turn, upper_batch, state):
                slope = turn.lower_set.tangent(turn.upper_gradient_y(upper_batch))
                return turn.lr(self.lr) * slope, state, turn.lower_cost(1)


        solver = aipod.Alternating(aipod.ProjectedSGD(), Scaled(), aipod.EveryStep(lr=0.1))
        ```
    """

    # A plain attribute, so that a subclass may answer with a field or a property as it likes.
    if TYPE_CHECKING:

        @property
        def lr(self) -> StepSize | None:
            """The step size, where the method has one."""

    else:
        lr = None

    @abc.abstractmethod
    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        """z at (x, y), the state for the next outer step, and what it cost.

        `upper_batch` is the sample that x will see as well.
        """

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """The state before the first outer step.

        Only shapes and types may be read from the problem, x and y: over a network the server
        calls this without any data.
        """
        return None

    def health(self, state: PyTree) -> Health | None:
        """How the last solve went; None where the slot does not know."""
        return None

    def failed(self, state: PyTree) -> Array | None:
        """Whether the last solve broke down, so that z means nothing; None where it cannot."""
        return None

    def failure(self, state: PyTree) -> str:
        """Why it did, and the remedy, in a sentence."""
        return "the adjoint could not be solved."

    def remedy(self, off: float) -> str:
        """What to change when z is `off` by this share of its size."""
        return "solve the adjoint further: with more steps, or by aipod.ConjugateGradient()."

    @property
    def draws(self) -> tuple[int, int]:
        """Batches of the lower and of the upper level that one outer step draws, where known."""
        return 0, 0

    @property
    def single(self) -> bool:
        """Whether an outer step asks for exactly one product, where that is known."""
        return False

    @property
    def deferred(self) -> bool:
        """Whether a projection is left to `settle`, at the end of the outer step."""
        return False

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        """The state after the projection that was left to the end of the outer step."""
        return state

    def told(self, state: PyTree) -> PyTree:
        """What the other slots hear from this one besides z, as `turn.told`, until the step ends.

        `state` is the one that `solve` has just returned. In a federation all clients must agree
        on it.
        """
        return None

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    def common(self, state: PyTree) -> PyTree:
        """For each leaf of the state whether it has a client axis along which nothing differs."""
        return jax.tree.map(lambda _: False, state)

    def own(self, state: PyTree) -> PyTree:
        """For each leaf of the state whether it belongs to one client; else all have the same.

        By default all clients have the same but for `health`, which is each one's own.
        """
        return self.own_health(jax.tree.map(lambda _: False, state))

    def own_health(self, mask: PyTree) -> PyTree:
        """A mask like a state, with True for what `health` finds in it."""
        mine = self.health(mask)
        if mine is None:
            return mask
        return eqx.tree_at(self.health, mask, jax.tree.map(lambda _: True, mine))
