"""What every upper slot answers, and the checks and steps that several share."""

import abc
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import cast_like, inner
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._paced import PacedTransformation
from aipod.slots.upper._seen import Seen
from aipod.stepsize import Curvature, StepSize, check_lr


class AbstractUpper(eqx.Module):
    """The slot that moves x along grad_x f + w, where w comes through y.

    A subclass must answer `update`. It may answer the rest: `lr` or `optimizer` when it has one,
    `init` when it keeps something else than the optimiser's state, and `needs_implicit` with False
    when it does not use w: then w is not computed, and its sample is neither drawn nor counted.
    A slot that answers `seen` lets a solution say how stationary it is.

    !!! example
        ```python
        class SignStep(aipod.AbstractUpper):
            lr: float = 0.01

            def update(self, turn, z, implicit, batch, state):
                sign = jnp.sign(turn.direction(implicit, batch))
                x = turn.problem.upper_set.project(turn.x - turn.lr(self.lr) * sign)
                return x, state, turn.upper_cost(1)


        solver = aipod.Alternating(aipod.ProjectedSGD(), aipod.Neumann(), SignStep())
        ```
    """

    # Plain attributes, so that a subclass may answer with a field or a property as it likes.
    if TYPE_CHECKING:

        @property
        def lr(self) -> StepSize | None:
            """The step size, where the method has one."""

        @property
        def optimizer(self) -> optax.GradientTransformation | None:
            """The optimiser of Optax, where the method has one."""

    else:
        lr = None
        optimizer = None

    @abc.abstractmethod
    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        """The next x, the next state, and what it cost.

        `z` is the adjoint, `implicit` is w (None where `needs_implicit` is False), and `batch` the
        sample of the upper level behind both.
        """

    @property
    def needs_implicit(self) -> bool:
        """Whether `update` uses `implicit`."""
        return True

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        """The state before the first outer step: the optimiser's, where there is an optimiser."""
        return None if self.optimizer is None else self.optimizer.init(x)

    @property
    def needs_moves(self) -> bool:
        """Whether `update` uses `turn.moves` or `turn.promise`."""
        return isinstance(self.optimizer, PacedTransformation)

    def seen(self, state: PyTree) -> Seen | None:
        """The projected hypergradient of the last step; None where the slot keeps none.

        In a federation all clients must agree on it.
        """
        return None

    def common(self, state: PyTree) -> PyTree | None:
        """For each leaf of the state whether all clients have the same when an outer step is over.

        None where x itself may differ. What is common is kept once.
        """
        return None

    def needs_each(self, state: PyTree) -> bool:
        """Whether `update` needs the gradient of each client, or one step for all is enough."""
        return True

    @property
    def sends_direction(self) -> bool:
        """Whether all that a client sends in `update` is one vector, the direction of x."""
        return False

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    def wire_back(self, problem: Bilevel) -> str | None:
        """The type of the numbers of x that the server sends back; None for their own."""
        return None


def _check_optimizer(optimizer: Any) -> None:
    """Raises `ValueError` unless optimizer is an optimiser of Optax, or None."""
    if optimizer is not None and not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        raise ValueError(
            "upper_optimizer must be an optimiser of Optax, such as optax.adam(1e-3), got "
            f"{type(optimizer).__name__}."
        )


def check_between(lr: StepSize | None, optimizer: Any, steps: int) -> None:
    """Raises `ValueError` when there are steps before the optimiser's, but no size for them."""
    if lr is None and steps > 1 and not isinstance(optimizer, PacedTransformation):
        raise ValueError(
            f"upper_optimizer with upper_steps={steps} also needs upper_lr, the size of the steps "
            "between two projections; or set upper_steps=1."
        )


def check_one_of(lr: StepSize | None, optimizer: optax.GradientTransformation | None) -> None:
    """Raises `ValueError` unless exactly one of the two says how x moves."""
    if (lr is None) == (optimizer is None):
        raise ValueError("give either upper_lr or upper_optimizer, one of the two.")


def check_moves(lr: StepSize | None, optimizer: Any) -> None:
    """Raises `ValueError` unless lr is a step size for x and optimizer one of Optax's, or None."""
    _check_optimizer(optimizer)
    if isinstance(lr, Curvature):
        raise ValueError(
            "upper_lr cannot be aipod.Curvature(), which measures the lower level: give a number, "
            "an Optax schedule, or an optimiser as upper_optimizer=."
        )
    if lr is not None:
        check_lr(lr, "upper_lr")


def step_between(
    turn: Turn, lr: StepSize | None, steps: int, implicit: PyTree | None, batch: Any
) -> Array:
    """The size of the steps between two projections.

    Without `lr`, as many of them as there are make about the way of the last outer step: along the
    hypergradient h, x moved by |dx|^2 / |<h, dx>| times h.
    """
    if lr is not None or steps == 1 or turn.moves is None:
        return turn.lr(lr)
    upper_set, moved = turn.problem.upper_set, turn.moves[0]
    square = upper_set.summed(inner(moved, moved, per_client=upper_set.per_client))
    promised = jnp.abs(turn.promise(implicit, batch).promised)
    return jnp.where(promised > 0, square / jnp.where(promised > 0, promised, 1.0), 0.0) / steps


def optimizer_step(
    turn: Turn,
    optimizer: optax.GradientTransformation,
    along: PyTree,
    state: PyTree,
    implicit: PyTree | None,
    batch: Any,
) -> tuple[PyTree, PyTree]:
    """x moved by any Optax transformation of a direction that lies in the tangent space.

    Projecting before and after keeps exactly the stationary points of the projected method for
    every positive diagonal preconditioner D: (P g)' D (P g) = 0 only where P g = 0.
    """
    x, upper_set = turn.x, turn.problem.upper_set
    if isinstance(optimizer, PacedTransformation) and turn.moves is not None:
        told = turn.promise(implicit, batch)._asdict()
        change, state = optimizer.update(
            along, state, x, moved=turn.moves[0], stiffer=turn.rates.stiffer, **told
        )
    else:
        change, state = optimizer.update(along, state, x)
    return cast_like(upper_set.project(optax.tree.add(x, change)), x), state
