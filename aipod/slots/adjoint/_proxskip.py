"""ProxSkip for the adjoint: the medium level of E2-AiPOD, which skips projections too."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import inner
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._proxskip import watched_proxskip
from aipod.slots._spelling import once_is_one_round
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy, pull_of
from aipod.slots.adjoint._one_round import (
    OneRoundAdjoint,
    WarmState,
    followed,
    only_correction,
    warm_start,
)
from aipod.slots.adjoint._quadratic import damped, quadratic_parts
from aipod.stepsize import (
    Curvature,
    StepSize,
    check_lr,
    check_not_negative,
    check_probability,
    check_steps,
)


@once_is_one_round
class ProxSkipAdjoint(AbstractAdjoint):
    """ProxSkip on the quadratic 1/2 u' G u + u' grad_y f over Ker A; z = -u (E2-AiPOD).

        u_hat = u - rho (grad_y f(x, y; xi) + G(phi) u - e)              (`update-hatlambda-WS`)
        with probability q:  u <- P (u_hat - (rho / q) e)                      (`update-lz1-WS`)
                             e <- e + (q / rho) (u - u_hat)                    (`update-lz2-WS`)
        otherwise:           u <- u_hat

    started at u = e = 0 in every outer step, as the paper does, or with `warm` from where the
    step before ended. A cold start is only for sets without coupling: the paper's E2-AiPOD is made
    for h = 0.

    **Arguments:**

    - `steps` [N]: iterations per outer step, each on fresh samples of both levels.
    - `lr` [rho]: at most 1 / l_g1.
    - `prob` [q]: how often to project. `ProxSkipAdjoint(prob=None, warm=True)` is another way to
        write `OneRoundAdjoint()`, which projects exactly once, at the end of the outer step.
    - `warm`: keep u and e from one outer step to the next.
    - `damping`: a Tikhonov term, G + damping I. Where the lower level is not convex, an undamped
        warm start grows without bound. None, which finds the damping, is for `prob=None` alone.
    - `compression`: of messages, for `prob=None` alone.

    !!! example
        ```python
        adjoint = aipod.ProxSkipAdjoint(steps=10, lr=0.1, prob=0.3)
        ```
    """

    steps: int = eqx.field(static=True, default=10)
    lr: StepSize = Curvature()
    prob: float = 0.3
    warm: bool = eqx.field(static=True, default=False)
    damping: float | None = 0.0
    compression: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_lr(self.lr, "adjoint_lr")
        check_probability(self.prob, "adjoint_prob (q)")
        if self.damping is None:
            raise ValueError(
                "damping=None, which finds the damping by itself, goes with prob=None: give a "
                "number, 0 for a convex lower level."
            )
        check_not_negative(self.damping, "damping")
        if self.compression is not None:
            raise ValueError(
                "compression needs the single projection of aipod.OneRoundAdjoint(), also written "
                "ProxSkipAdjoint(prob=None, warm=True): leave compression out, or prob."
            )

    @staticmethod
    def once(warm: bool = False, **arguments: Any) -> OneRoundAdjoint:
        """What `prob=None` makes."""
        if not warm:
            raise ValueError(
                "ProxSkipAdjoint projects once at the end (prob=None), which a cold start would "
                "throw away: set warm=True, or give adjoint_prob."
            )
        return OneRoundAdjoint(**({"steps": 10, "damping": 0.0} | arguments))

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps, self.steps

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        if problem.lower_set.coupled and not self.warm:
            raise ValueError(
                "lower_set has a coupling h(x), which E2-AiPOD and its adjoint ProxSkipAdjoint do "
                "not take (they need h = 0): use aipod.AiPOD, aipod.EAiPOD or aipod.E3AiPOD."
            )
        problem.lower_set.check_corrections(y, name="lower_set")
        health = healthy(y, problem.lower_set)
        if not self.warm:
            return health
        return warm_start(problem.lower_set, y, self.damping, health)

    def health(self, state: PyTree) -> Health | None:
        return state.health if self.warm else state

    def own(self, state: PyTree) -> PyTree:
        mask = only_correction(state) if self.warm else jax.tree.map(lambda _: False, state)
        return self.own_health(mask)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lower_set = turn.problem.lower_set
        start = state if self.warm else warm_start(lower_set, turn.y, self.damping)
        start = followed(lower_set, start) if self.warm else start
        parts, memory = quadratic_parts(turn, self.steps)
        lr = turn.lr(self.lr)

        def dot(a: PyTree, b: PyTree) -> Array:
            return inner(a, b, per_client=lower_set.per_client)

        def gradient(u: PyTree, key: PRNGKeyArray, carried: Any) -> tuple[PyTree, Any]:
            slope, product, memory = parts(u, key, carried[0])
            pull = carried[1]
            if self.warm:
                pull = pull_of(dot(u, product), dot(u, u), lr * self.steps).astype(pull.dtype)
            return damped(u, slope, product, start.damping), (memory, pull)

        found = watched_proxskip(
            gradient,
            lower_set.directions(),
            start.u,
            start.correction,
            lr=lr,
            probability=self.prob,
            steps=self.steps,
            key=turn.key,
            memory=(memory, jnp.zeros_like(dot(start.u, start.u))),
            met=start.met(lower_set),
        )
        memory, pull = found.memory
        kept: Any = self._seen(turn, found.products, pull)
        if self.warm:
            shared = None if found.met is None else found.met.shared
            kept = WarmState(
                found.point, found.correction, start.damping, health=kept, shared=shared
            )
        draws = 0 if turn.shares_draws else self.steps
        cost = turn.lower_cost(
            found.projections, lower_draws=self.steps, upper_draws=draws, memory=memory
        )
        return optax.tree.scale(-1, found.point), kept, cost

    def _seen(self, turn: Turn, products: Array, pull: Array) -> Health:
        """From a cold start the first two residuals are nearly the right-hand side."""
        left = right = jnp.zeros_like(products[0])
        if self.steps > 2 and not self.warm:
            left, right = products[-1], products[1]
        pulled = pull if self.warm else 1.0
        return health_of(turn.y, turn.problem.lower_set, left, right, left > right, pulled)
