"""FedNest's loop on x: several local steps between two averages, variance-reduced or plain."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import round_key, subkeys
from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel, draw, implicit_term
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_between,
    check_moves,
    optimizer_step,
    step_between,
)
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize, check_steps


class LocalUpper(AbstractUpper):
    """tau unprojected steps on x with one z, then a projection (FedOut).

        h(x) = grad_x f(x, y; xi) + w(x, y, z; phi),   m = P_x h(x),   v_0 = x
        v_{i+1} = v_i - alpha (h_i(v_i) - h_i(x) + m),   x <- project_x(v_tau)

    with fresh samples in every h_i. Two rounds of a federation: h, and x. With tau = 1 the step is
    x - alpha m, the same for all clients, and one round is enough. Not `corrected`, the steps are
    plain, v_{i+1} = v_i - alpha h_i(v_i), and there is one round.

    **Arguments:**

    - `lr` [alpha]: the step size; may be left out with an optimiser where tau = 1, and with
        `aipod.paced_adam()`, whose last move the steps then share.
    - `steps` [tau]: steps between two projections.
    - `corrected`: whether the steps are variance-reduced.
    - `optimizer`: an `optax.GradientTransformation` of the pseudo-gradient x - project_x(v_tau),
        as in `Delayed`.
    - `nested`: whether h has the part w. Without, x follows grad_x f alone, as in FedAvg.

    !!! example
        ```python
        upper = aipod.LocalUpper(lr=0.01, steps=5)
        ```
    """

    lr: StepSize | None = None
    steps: int = eqx.field(static=True, default=1)
    corrected: bool = eqx.field(static=True, default=True)
    optimizer: optax.GradientTransformation | None = None
    nested: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (tau)")
        check_moves(self.lr, self.optimizer)
        if self.lr is None and self.optimizer is None:
            raise ValueError("give upper_lr, or an optimiser as upper_optimizer=.")
        check_between(self.lr, self.optimizer, self.steps)

    @property
    def needs_implicit(self) -> bool:
        return self.nested

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        if not problem.upper_set.affine:
            raise ValueError(
                "upper_set has bounds, which LocalUpper does not take: use aipod.EveryStep or "
                "aipod.Delayed, which the solvers AiPOD, EAiPOD and E3AiPOD have."
            )
        own = None if self.optimizer is None else self.optimizer.init(x)
        return UpperState(own, nothing_seen(problem, x, difference=True))

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def needs_each(self, state: PyTree) -> bool:
        return self.steps > 1

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x = turn.problem, turn.x
        lr = step_between(turn, self.lr, self.steps, implicit, batch)
        upper_set = problem.upper_set
        keys = turn.keys(2 + self.steps)

        def slope(point: PyTree, sample_key: PRNGKeyArray) -> PyTree:
            upper_key, lower_key = subkeys(sample_key, 2)
            xi = draw(problem.upper_samples, upper_key)
            part = None
            if self.nested:
                phi = draw(problem.lower_samples, lower_key)
                part = implicit_term(problem, point, turn.y, z, xi, phi)
            return turn.direction(part, xi, point)

        here = turn.direction(implicit, batch)
        mean_round = upper_set.for_round(round_key(turn.key, 1))
        mean = mean_round.tangent(here) if self.corrected else here

        def local(total: PyTree, sample_key: PRNGKeyArray) -> tuple[PyTree, None]:
            direction = slope(axpy(x, -lr, total), sample_key)
            if self.corrected:
                drift = optax.tree.sub(mean, slope(x, sample_key))
                direction = optax.tree.add(direction, drift)
            return optax.tree.add(total, direction), None

        # At x itself the first step needs no sample of its own: h_0(x) - h_0(x) + m = m.
        total = mean
        if self.steps > 1:
            total, _ = jax.lax.scan(local, total, keys[3:])
        last_round = upper_set.for_round(turn.round_key)
        averages = 2 if self.corrected and self.steps > 1 else 1
        projections, draws = averages, self.steps - 1
        own, length = state.own, lr * self.steps
        if self.lr is None:
            # The clients agree on the mean already: the optimiser's projection sends nothing.
            along, length = optax.tree.scale(1 / self.steps, total), jnp.ones(())
            along = cast_like(last_round.tangent(along), x)
        else:
            new = cast_like(last_round.project(axpy(x, -lr, total)), x)
            along = optax.tree.sub(x, new)
        if self.optimizer is not None:
            new, own = optimizer_step(turn, self.optimizer, along, own, implicit, batch)
            seen = by_optimizer(state.seen, upper_set, along, x, new, length)
            projections = averages + 1
        else:
            seen = by_difference(state.seen, x, new, length)
        cost = turn.upper_cost(
            projections,
            rounds=averages,
            upper_draws=draws,
            lower_draws=draws if self.nested else 0,
        )
        return new, UpperState(own, seen), cost
