"""How x moves once the implicit part w of its gradient is known: the upper slot."""

import abc
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._hypergradient._exact import upper_gradient
from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, cast_like, is_concrete
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._compression import check_compression, told
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate, check_steps


class AbstractUpper(eqx.Module):
    """The slot that moves x along grad_x f + w."""

    lr: eqx.AbstractVar[StepSize | None]
    optimizer: eqx.AbstractVar[optax.GradientTransformation | None]

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        """The optimiser's state, where there is an optimiser."""
        return None if self.optimizer is None else self.optimizer.init(x)

    @abc.abstractmethod
    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        """The next x, the next state, and what it cost; `batch` is the sample behind w."""


def check_between(lr: StepSize | None, steps: int) -> None:
    """Raises `ValueError` when there are steps before the optimiser's, but no size for them."""
    if lr is None and steps > 1:
        raise ValueError(
            f"upper_optimizer with upper_steps={steps} also needs upper_lr, the size of the steps "
            "between two projections; or set upper_steps=1."
        )


def check_one_of(lr: StepSize | None, optimizer: optax.GradientTransformation | None) -> None:
    """Raises `ValueError` unless exactly one of the two says how x moves."""
    if (lr is None) == (optimizer is None):
        raise ValueError("give either upper_lr or upper_optimizer, one of the two.")


def check_upper_rate(lr: StepSize | None) -> None:
    """Raises `ValueError` unless lr is a step size for x, or None."""
    if isinstance(lr, Curvature):
        raise ValueError(
            "upper_lr cannot be aipod.Curvature(), which measures the lower level: give a number, "
            "an Optax schedule, or an optimiser as upper_optimizer=."
        )
    if lr is not None:
        check_rate(lr, "upper_lr")


def _cost(
    problem: Bilevel,
    projections: Array | int,
    *,
    rounds: Array | int | None = None,
    upper_samples: int = 0,
) -> Cost:
    """Of an upper slot that averages one vector of the size of x in each of its rounds."""
    sent = rounds_of(problem.upper_set, projections if rounds is None else rounds)
    return Cost(projections, upper_samples=upper_samples, rounds=sent, sent_x=sent)


def _direction(problem: Bilevel, x: PyTree, y: PyTree, implicit: PyTree, batch: Any) -> PyTree:
    gradient = optax.tree.add(upper_gradient(problem, x, y, batch), implicit)
    return problem.upper_set.riesz(gradient)


def optimizer_step(
    problem: Bilevel,
    optimizer: optax.GradientTransformation,
    along: PyTree,
    state: PyTree,
    x: PyTree,
) -> tuple[PyTree, PyTree]:
    """x moved by any Optax transformation of a direction that lies in the tangent space.

    Projecting before and after keeps exactly the stationary points of the projected method for
    every positive diagonal preconditioner D: (P g)' D (P g) = 0 only where P g = 0.
    """
    change, state = optimizer.update(along, state, x)
    return cast_like(problem.upper_set.project(optax.tree.add(x, change)), x), state


class EveryStep(AbstractUpper):
    """One step, projected every time, as AiPOD does.

        x <- project_x(x - alpha (grad_x f + w))

    With `optimizer`, any Optax transformation u of the projected gradient instead:
    x <- project_x(x + u(P_x (grad_x f + w))).

    **Arguments:**

    - `lr` [alpha]: the step size; or
    - `optimizer`: an `optax.GradientTransformation`.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits.

    !!! example
        ```python
        upper = aipod.EveryStep(optimizer=optax.adam(1e-3))
        ```
    """

    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None
    compression: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_upper_rate(self.lr)
        check_compression(self.compression)
        check_one_of(self.lr, self.optimizer)

    @property
    def wire(self) -> str | None:
        return self.compression

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        state = super().init(problem, x)
        return state if self.compression is None else (state, optax.tree.zeros_like(x))

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        direction = _direction(turn.problem, turn.x, turn.y, implicit, batch)
        if self.compression is not None:
            own, known = state
            known = told(direction, known, self.compression)
            x, own, cost = self._move(turn, known, own)
            return x, (own, known), cost
        return self._move(turn, direction, state)

    def _move(self, turn: Turn, direction: PyTree, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, _, rates, key = turn
        if self.optimizer is not None:
            along = cast_like(problem.upper_set.for_round(key).tangent(direction), x)
            x, state = optimizer_step(problem, self.optimizer, along, state, x)
            # x + u agrees between clients as P g does: the second projection sends nothing.
            return x, state, _cost(problem, 2, rounds=1)
        moved = problem.upper_set.for_round(key).project(axpy(x, -rates(self.lr), direction))
        return cast_like(moved, x), state, _cost(problem, 1)


class Delayed(AbstractUpper):
    """T steps with one w and no projection, then one projection scaled by delta (E-AiPOD).

        x_{t+1} = x_t - alpha (grad_x f(x_t, y; xi_t) + w),   t = 0..T-1   (`update-xkt`, `NS-hf-t`)
        x <- (1 - delta) x + delta project_x(x_T)                                       (`delta-x`)

    With `optimizer` the last line is that transformation's step on the pseudo-gradient
    x - project_x(x_T), of which delta is the special case `optax.sgd(delta)`.

    **Arguments:**

    - `steps` [T]: unprojected steps.
    - `delta` [delta]: the extrapolation, at least 1; the paper's choice is 1 or sqrt(T).
    - `lr` [alpha]: the size of the T steps; may be left out where T = 1 and there is an optimiser.
    - `optimizer`: an `optax.GradientTransformation` in place of delta.

    !!! example
        ```python
        upper = aipod.Delayed(steps=4, delta=2.0, lr=0.01)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    delta: float = 1.0
    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (T)")
        check_upper_rate(self.lr)
        if is_concrete(self.delta) and not float(self.delta) >= 1:
            raise ValueError(f"extrapolation (delta) must be at least 1, got {self.delta}.")
        if self.lr is None and self.optimizer is None:
            raise ValueError("give upper_lr, or an optimiser as upper_optimizer=.")
        check_between(self.lr, self.steps)
        if self.optimizer is not None and self.delta != 1:
            raise ValueError(
                "extrapolation and upper_optimizer both say how far to go after the projection: "
                "give one of the two (extrapolation is optax.sgd(extrapolation))."
            )

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        rate = rates(self.lr)

        def local(point: PyTree, sample: Any) -> PyTree:
            return axpy(point, -rate, _direction(problem, point, y, implicit, sample))

        def body(point: PyTree, draw_key: PRNGKeyArray) -> tuple[PyTree, None]:
            return local(point, draw(problem.upper_samples, draw_key)), None

        keys = subkeys(key, self.steps)
        # xi_0 is the sample of w, as in AiPOD; the later steps draw their own.
        moved = local(x, batch)
        if self.steps > 1:
            moved, _ = jax.lax.scan(body, moved, keys[1:])
        landed = cast_like(problem.upper_set.for_round(keys[0]).project(moved), x)
        spent = (self.steps - 1) * batch_size(problem.upper_samples)
        cost = _cost(problem, 1, upper_samples=spent)
        if self.optimizer is not None:
            along = optax.tree.sub(x, landed)
            x, state = optimizer_step(problem, self.optimizer, along, state, x)
            return x, state, _cost(problem, 2, rounds=1, upper_samples=spent)
        if isinstance(self.delta, float | int) and self.delta == 1:
            return landed, state, cost
        # The difference lies in the tangent space but for rounding. Left as it is, every step would
        # multiply the error off the set by 1 - delta: for delta above 2 a long run ends in NaN.
        along = problem.upper_set.tangent(optax.tree.sub(landed, x))
        return axpy(x, self.delta, along), state, cost


class Periodic(AbstractUpper):
    """One step each time, projected when k mod T = 0 only (E2-AiPOD).

        x <- x - alpha (grad_x f + w);   and when k mod T = 0 also x <- project_x(x)   (`WS-x`)

    Between projections x leaves the upper set by O(alpha); `Solution.feasible()` brings it back.

    **Arguments:**

    - `steps` [T]: outer steps from one projection to the next.
    - `lr` [alpha]: the step size.
    - `optimizer`: an `optax.GradientTransformation` in place of `lr`, with T = 1 only: on an
        unprojected gradient its fixed points would not be the stationary points.

    !!! example
        ```python
        upper = aipod.Periodic(steps=5, lr=0.01)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (T)")
        check_upper_rate(self.lr)
        check_one_of(self.lr, self.optimizer)
        if self.optimizer is not None and self.steps > 1:
            raise ValueError(
                f"upper_optimizer needs a projection in every step, but upper_steps is "
                f"{self.steps}: set upper_steps=1, or use upper_lr."
            )

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        if self.steps == 1:
            return EveryStep(self.lr, self.optimizer).update(turn, z, implicit, batch, state)
        problem, x, y, rates, key = turn
        direction = _direction(problem, x, y, implicit, batch)
        moved = axpy(x, -rates(self.lr), direction)
        due = rates.step % self.steps == 0

        def projected() -> PyTree:
            return cast_like(problem.upper_set.for_round(key).project(moved), moved)

        new = jax.lax.cond(due, projected, lambda: moved)
        return new, state, _cost(problem, jnp.asarray(due, jnp.int32))


# One object for each pair of arguments: programs compiled with it are found again.
@functools.cache
def fading_adam(rate: float = 2e-3, fade: float = 500.0) -> optax.GradientTransformation:
    """Adam whose steps fade as 1 / sqrt(k), with a short memory of the direction (b1 = 0.5).

    The optimiser that E3-AiPOD takes unless told otherwise. Steps of a constant size let the
    features of a network grow without end; the curvature-safe steps on y then become too short.

    **Arguments:**

    - `rate`: the first step size.
    - `fade`: step k has the size rate / sqrt(1 + k / fade).

    !!! example
        ```python
        solver = aipod.E3AiPOD(upper_optimizer=aipod.fading_adam(0.001))
        ```
    """
    for name, value in (("rate", rate), ("fade", fade)):
        if not 0 < value < float("inf"):
            raise ValueError(f"fading_adam: {name} must be positive and finite, got {value}.")
    return optax.adam(lambda k: rate / jnp.sqrt(1 + k / fade), b1=0.5, b2=0.999)
