"""ProxSkip for the adjoint: the projections of E2-AiPOD's medium level are skipped too."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.sets import AbstractSet
from aipod.slots._compression import check_compression
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._proxskip import (
    check_probability,
    local_step,
    proxskip,
    settle,
    step_keys,
)
from aipod.slots._turn import Turn
from aipod.slots.adjoint._neumann import AbstractAdjoint, adjoint_cost, check_damping
from aipod.stepsize._curvature import hessian_product
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate, check_steps


class WarmState(eqx.Module):
    """What a warm start keeps: u, its correction e, the damping in force, and, with compression,
    what the server knows of each client.
    """

    u: PyTree
    correction: PyTree
    damping: Array
    known: PyTree | None = None


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
    - `prob` [q]: how often to project. None stands for exactly once, q = 1 / N, at the end of the
        outer step, which needs `warm`: in a federation u then shares the round of x (E3-AiPOD).
    - `warm`: keep u and e from one outer step to the next.
    - `damping`: a Tikhonov term, G + damping I. Where the lower level is not convex, an undamped
        warm start grows without bound. None, for `prob=None`, stands for none as long as G is
        positive along every u it meets, and for a term that covers what was met otherwise.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, with `prob=None` only.

    !!! example
        ```python
        adjoint = aipod.ProxSkipAdjoint(steps=10, lr=0.1, prob=0.3)
        ```
    """

    steps: int = eqx.field(static=True, default=10)
    lr: StepSize = Curvature()
    prob: float | None = 0.3
    warm: bool = eqx.field(static=True, default=False)
    damping: float | None = 0.0
    compression: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_rate(self.lr, "adjoint_lr")
        check_probability(self.prob, "adjoint_prob (q)")
        if self.damping is not None:
            check_damping(self.damping)
        elif self.prob is not None:
            raise ValueError(
                "damping=None, which finds the damping by itself, goes with prob=None: give a "
                "number, 0 for a convex lower level."
            )
        check_compression(self.compression, self.prob)
        if self.prob is None and not self.warm:
            raise ValueError(
                "ProxSkipAdjoint projects once at the end (prob=None), which a cold start would "
                "throw away: set warm=True, or give adjoint_prob."
            )

    @property
    def rate(self) -> StepSize:
        return self.lr

    @property
    def wire(self) -> str | None:
        return self.compression

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps, self.steps

    @property
    def deferred(self) -> bool:
        return self.prob is None

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        if problem.lower_set.coupled and not self.warm:
            raise ValueError(
                "lower_set has a coupling h(x), which E2-AiPOD and its adjoint ProxSkipAdjoint do "
                "not take (they need h = 0): use aipod.AiPOD, aipod.EAiPOD or aipod.E3AiPOD."
            )
        return self._start(y) if self.warm else None

    def _start(self, y: PyTree) -> WarmState:
        zeros = optax.tree.zeros_like(y)
        given = 0.0 if self.damping is None else self.damping
        damping = jnp.asarray(given, jnp.result_type(*jax.tree.leaves(y)))
        return WarmState(zeros, zeros, damping, None if self.compression is None else zeros)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        start = state if self.warm else self._start(y)
        lower_set, rate = problem.lower_set, rates(self.lr)
        objective, samples = problem.lower_at(x, draws=self.steps)
        upper, upper_samples = problem.upper_at(x, draws=self.steps)
        spent = {
            "upper_samples": self.steps * batch_size(problem.upper_samples),
            "lower_samples": self.steps * batch_size(problem.lower_samples),
        }

        def parts(u: PyTree, draw_key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
            """grad_y f and G u, as directions of the set."""
            upper_key, lower_key = subkeys(draw_key, 2)
            slope = jax.grad(upper)(y, draw(upper_samples, upper_key))
            batch = draw(samples, lower_key)
            product = hessian_product(lambda t: objective(t, batch), y, u)
            return lower_set.riesz(slope), lower_set.riesz(product)

        def damped(u: PyTree, slope: PyTree, product: PyTree, damping: Array) -> PyTree:
            return axpy(optax.tree.add(slope, product), damping, u)

        if self.prob is not None:
            u, correction, projections = proxskip(
                lambda u, draw_key: damped(u, *parts(u, draw_key), start.damping),
                lower_set.directions(),
                start.u,
                start.correction,
                rate=rate,
                probability=self.prob,
                steps=self.steps,
                key=key,
            )
            kept = WarmState(u, correction, start.damping) if self.warm else None
            return optax.tree.scale(-1, u), kept, adjoint_cost(problem, projections, **spent)

        def body(carry: tuple[PyTree, Array], draw_key: PRNGKeyArray) -> tuple[Any, None]:
            u, damping = carry
            slope, product = parts(u, draw_key)
            if self.damping is None:
                damping = _enough(damping, u, product, lower_set, rate)
            slope = damped(u, slope, product, start.damping)
            return (local_step(slope, u, start.correction, rate), damping), None

        (u, damping), _ = jax.lax.scan(
            body, (start.u, start.damping), step_keys(key, self.steps)[1]
        )
        kept = WarmState(u, start.correction, damping, start.known)
        cost = Cost(1, sent_y=rounds_of(lower_set, 1), **spent)
        return optax.tree.scale(-1, u), kept, cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        problem, rates, key = turn.problem, turn.rates, turn.key
        if self.prob is not None:
            return state
        u, correction, known = settle(
            problem.lower_set.directions(),
            state.u,
            state.correction,
            state.known,
            rate=rates(self.lr),
            probability=1 / self.steps,
            compression=self.compression,
            key=key,
        )
        return WarmState(u, correction, state.damping, known)


def _enough(
    damping: Array, u: PyTree, product: PyTree, lower_set: AbstractSet, rate: Array
) -> Array:
    """The damping, raised where G has just been seen to bend down along u.

    In a federation each client looks along its own u; what it sees are three numbers, which travel
    with the round at the end of the step, after which the new damping holds.
    """
    dot = jax.vmap(optax.tree.vdot) if lower_set.per_client else optax.tree.vdot
    along, size, image = dot(u, product), dot(u, u), dot(product, product)
    # By an angle, which has no unit; rounding error of a flat convex objective stays below it.
    bends_down = lower_set.largest(-along - _DOWN * jnp.sqrt(size * image)) > 0
    least = jnp.where(bends_down, _LEAST_DAMPING / rate, 0.0)
    # Along the common direction this is what would make u grow; twice as much makes it shrink.
    total = lower_set.summed(size)
    growth = -2 * lower_set.summed(along) / jnp.where(total > 0, total, 1.0)
    return jnp.maximum(damping, jnp.maximum(least, growth)).astype(damping.dtype)


# The cosine between u and G u from which on G counts as not convex.
_DOWN = 1e-2
# Then the damping is at least this share of the largest curvature, 1 / rho.
_LEAST_DAMPING = 1e-2
