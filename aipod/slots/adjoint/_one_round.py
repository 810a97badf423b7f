"""A warm adjoint with one projection at the end of the outer step: E3-AiPOD's."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import axpy, cast_like, inner
from aipod.problem import Bilevel, is_noisy
from aipod.sets import AbstractSet
from aipod.slots._compression import check_compression
from aipod.slots._cost import Cost
from aipod.slots._facing import is_face, turned
from aipod.slots._momentum import Mover, check_mover, restarted_momentum
from aipod.slots._proxskip import step_keys
from aipod.slots._settling import Met, land, settle, with_shared
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy, pull_of
from aipod.slots.adjoint._quadratic import damped, quadratic_parts
from aipod.slots.adjoint._stray import Straying
from aipod.stepsize import (
    Curvature,
    Rates,
    StepSize,
    adapts,
    check_lr,
    check_not_negative,
    check_steps,
)

# The cosine between u and G u from which on G counts as not convex.
_DOWN = 1e-2
# Then the damping is at least this share of the largest curvature, 1 / rho.
_LEAST_DAMPING = 1e-2


class WarmState(eqx.Module):
    """What a warm start keeps.

    - `u`, `correction`: u and e.
    - `damping`: the damping in force.
    - `known`: with compression, what the server knows of each client, if all are always there.
    - `health`: how the last solve went.
    - `momentum`: the state of the optimiser that moves u.
    - `shared`: where clients agree on a point of another set, the part of e that they share.
    - `straying`: of a solve that may give u up, whether u begins to stray.
    """

    u: PyTree
    correction: PyTree
    damping: Array
    known: PyTree | None = None
    health: Health | None = None
    momentum: PyTree | None = None
    straying: Straying | None = None
    shared: PyTree | None = None

    def met(self, lower_set: AbstractSet) -> Met | None:
        """For the projections of u; None where clients share nothing of their corrections."""
        if self.shared is None:
            return None
        return Met(optax.tree.zeros_like(self.shared), lower_set.single(self.u), self.shared)


def warm_start(
    lower_set: AbstractSet,
    y: PyTree,
    damping: float | None,
    health: Health | None = None,
    *,
    compressed: bool = False,
) -> WarmState:
    """u = e = 0."""
    zeros = optax.tree.zeros_like(y)
    dtype = jnp.result_type(*jax.tree.leaves(y))
    given = jnp.asarray(0.0 if damping is None else damping, dtype)
    shared = None if lower_set.agreement is None else lower_set.single(zeros)
    known = zeros if compressed else None
    return WarmState(zeros, zeros, given, known, health, shared=shared)


def followed(lower_set: AbstractSet, state: WarmState) -> WarmState:
    """The state on the face of this outer step; as it is where the lower set has no bounds."""
    if not is_face(lower_set):
        return state
    if state.shared is None:
        u, correction = turned(lower_set, state.u, state.correction)
        return dataclasses.replace(state, u=u, correction=correction)
    # The clients' own parts sum to zero on every face.
    one, shared = turned(lower_set.of_one, lower_set.single(state.u), state.shared)
    return dataclasses.replace(state, u=lower_set.for_all(one, state.u), shared=shared)


def only_correction(state: WarmState) -> PyTree:
    """True for the leaves of the correction, which belongs to one client; False for the rest."""
    mask = jax.tree.map(lambda _: False, state)
    mine = jax.tree.map(lambda _: True, state.correction)
    return eqx.tree_at(lambda s: s.correction, mask, mine)


class OneRoundAdjoint(AbstractAdjoint):
    """N corrected local steps on u = -z, then one projection ends the outer step (E3-AiPOD).

        u_hat <- u_hat - rho (grad_y f(x, y; xi) + G(phi) u_hat - e),   N times from u_hat = u
        at the end of the outer step:   u <- P (u_hat - rho N e)
                                        e <- e + (u - u_hat) / (rho N)

    u and e are kept from one outer step to the next. In a federation u shares the round of x.

    **Arguments:**

    - `steps` [N]: local steps per outer step, each on fresh samples of both levels.
    - `lr` [rho]: at most 1 / l_g1.
    - `damping`: a Tikhonov term, G + damping I. Where the lower level is not convex, an undamped
        warm start grows without bound. By default it is 0 as long as G bends up along every u that
        was seen, and afterwards large enough for what was seen.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, "float8" for 8 and "float4"
        for 4, with error feedback.
    - `optimizer`: moves u as the `optimizer` of `OneRound` moves y. By default
        `restarted_momentum(0.9, growth=0)` in a federation, and nothing elsewhere.

    !!! example
        ```python
        adjoint = aipod.OneRoundAdjoint(steps=2, lr=0.1)
        ```
    """

    steps: int = eqx.field(static=True, default=2)
    lr: StepSize = Curvature()
    damping: float | None = None
    compression: str | None = eqx.field(static=True, default=None)
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_lr(self.lr, "adjoint_lr")
        if self.damping is not None:
            check_not_negative(self.damping, "damping")
        check_compression(self.compression)
        check_mover(self.optimizer, "adjoint_optimizer")

    @property
    def wire(self) -> str | None:
        return self.compression

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps, self.steps

    @property
    def single(self) -> bool:
        return self.steps == 1

    @property
    def deferred(self) -> bool:
        return True

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        problem.lower_set.check_corrections(y, name="lower_set")
        health = healthy(y, problem.lower_set)
        compressed = self.compression is not None and problem.part == 1
        state = warm_start(problem.lower_set, y, self.damping, health, compressed=compressed)
        damping = jnp.broadcast_to(state.damping, problem.lower_set.apart)
        state = dataclasses.replace(state, damping=damping)
        if (mover := self._mover(problem.lower_set)) is None:
            return state
        return dataclasses.replace(state, momentum=mover.init(y))

    def _damped(self, state: WarmState, rates: Rates) -> tuple[Array, Array]:
        """The damping of this outer step, and the step size that goes with it.

        A step of 1 / l is too long for G + damping I.
        """
        damping, lr = state.damping, rates(self.lr)
        if self.damping is None:
            damping = jnp.maximum(damping, rates.damping).astype(damping.dtype)
        return damping, lr / (1 + lr * damping) if adapts(self.lr) else lr

    def _mover(self, lower_set: AbstractSet) -> Mover | None:
        default = restarted_momentum(0.9, growth=0)
        return Mover.of("adjoint_optimizer", self.optimizer, lower_set, default)

    def health(self, state: PyTree) -> Health | None:
        return state.health

    def common(self, state: PyTree) -> PyTree:
        mask = jax.tree.map(lambda _: False, state)
        return eqx.tree_at(lambda s: s.u, mask, jax.tree.map(lambda _: True, state.u))

    def own(self, state: PyTree) -> PyTree:
        return self.own_health(only_correction(state))

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lower_set = turn.problem.lower_set
        state = followed(lower_set, state)
        damping, lr = self._damped(state, turn.rates)
        parts, memory = quadratic_parts(turn, self.steps)
        correction = with_shared(state.correction, state.shared)

        def dot(a: PyTree, b: PyTree) -> Array:
            return inner(a, b, per_client=lower_set.per_client)

        def body(carry: tuple[PyTree, Any], key: PRNGKeyArray) -> tuple[Any, Any]:
            u, memory = carry
            slope, product, memory = parts(u, key, memory)
            gradient = damped(u, slope, product, damping)
            left = optax.tree.sub(gradient, correction)
            pairs = ((u, product), (u, u), (product, product), (left, left), (slope, slope))
            # Side by side: a loop writes each array of what it returns by itself.
            return (axpy(u, -lr, left), memory), jnp.stack([dot(*pair) for pair in pairs])

        keys = step_keys(turn.key, self.steps)[1]
        (u, memory), numbers = jax.lax.scan(body, (state.u, memory), keys)
        *seen, left, right = (numbers[:, i] for i in range(numbers.shape[1]))
        raised = state.damping
        # An estimate of G u bends down where its table is old, which says nothing about G.
        if self.damping is None and not turn.estimated:
            raised = _enough(raised, tuple(seen), lower_set, lr)
        # With noise a residual says more about the sample than about u.
        exact = not is_noisy(turn.problem)
        left, right = left[-1] * exact, right[-1] * exact
        pull = pull_of(seen[0][-1], seen[1][-1], lr * self.steps)
        health = health_of(turn.y, lower_set, left, right, raised > state.damping, pull)
        kept = dataclasses.replace(state, u=u, damping=raised, health=health)
        draws = 0 if turn.shares_draws else self.steps
        cost = turn.lower_cost(
            1, lower_draws=self.steps, upper_draws=draws, deferred=True, memory=memory
        )
        # u_hat is not projected yet, and e lags behind a face that moves: as `OneRound.seen_from`.
        return optax.tree.scale(-1, cast_like(lower_set.loose(u), u)), kept, cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        directions = turn.problem.lower_set.directions()
        before, shared = (state.u, state.correction), None
        how: dict[str, Any] = {
            # The damping that the steps were made with.
            "lr": self._damped(turn.start, turn.rates)[1],
            "probability": 1 / self.steps,
            "compression": self.compression,
            "key": turn.round_key,
            "begun": turn.start.u,
        }
        if (met := state.met(directions)) is None:
            u, correction, known = settle(directions, *before, state.known, **how)
        else:
            u, correction, met, known = land(directions, *before, met, state.known, **how)
            shared = met.shared
        damping = turn.problem.lower_set.for_round(turn.round_key).heard(state.damping)
        momentum = state.momentum
        if (mover := self._mover(turn.problem.lower_set)) is not None:
            u, momentum = mover(turn.start.u, u, momentum)
            if shared is not None:
                # The start may lie on another face.
                u = cast_like(directions.alone(u), u)
        kept = (u, correction, damping, known, state.health, momentum)
        return WarmState(*kept, state.straying, shared)


def _enough(
    damping: Array, seen: tuple[Array, Array, Array], lower_set: AbstractSet, lr: Array
) -> Array:
    """The damping, raised where G has just been seen to bend down along u.

    `seen`: for each step <u, G u>, |u|^2 and |G u|^2. In a federation each client looks along its
    own u; what it sees are numbers, which travel with the round at the end of the step, after which
    the new damping holds.
    """
    along, size, image = seen
    kind = damping.dtype
    # By an angle, which has no unit; rounding error of a flat convex objective stays below it.
    down = jnp.any(-along > _DOWN * jnp.sqrt(size * image), axis=0)
    bends_down = lower_set.summed(down.astype(kind)) > 0
    damping = jnp.maximum(damping, jnp.where(bends_down, _LEAST_DAMPING / lr, 0.0))
    for step in range(size.shape[0]):
        # Along the common direction this would make u grow; twice as much makes it shrink.
        total = lower_set.summed(size[step])
        growth = -2 * lower_set.summed(along[step]) / jnp.where(total > 0, total, 1.0)
        damping = jnp.maximum(damping, growth)
    return damping.astype(kind)
