"""One projection at the end of the outer step: the lower level of E3-AiPOD."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import cast_like
from aipod.problem import Bilevel, is_random
from aipod.sets import AbstractSet
from aipod.slots._asking import lower_oracle
from aipod.slots._compression import check_compression
from aipod.slots._cost import Cost
from aipod.slots._facing import Facing, nothing_faced, on_face
from aipod.slots._momentum import Mover, check_mover, restarted_momentum
from aipod.slots._proxskip import local_steps
from aipod.slots._settling import land, settle, with_shared
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import (
    Curvature,
    Rates,
    StepSize,
    Tempering,
    agreement,
    balance_within,
    beside,
    calmed,
    check_lr,
    check_relaxation,
    check_steps,
    is_tempered,
    one_of,
    spread_of,
    tempered,
)

# How many times its plain update the correction moves by default, while noise is small and local
# steps settle. Measured on the MNIST tasks: 1.3 gains less, and 1.8 oscillates on loss-tuning.
_RELAXED = 1.5
# How far that is so, by the agreement R of the local steps: not at all below the first and above
# the last of these, fully between the other two.
_NOISE, _CALM, _SETTLED, _GOING_ON = 0.9, 1.05, 1.4, 1.8


class OneRoundState(eqx.Module):
    """What is kept besides y.

    - `correction`: r; where clients agree on a point within bounds, without what they share
        (`facing.shared`).
    - `known`: with compression, what the server knows of each client, if all are always there.
    - `share`, `agreement`: with tempered steps, the share of the curvature's step in force, and how
        far the last local steps agreed.
    - `facing`: on a set with bounds, which of them are active.
    - `momentum`: the state of the optimiser that moves y.
    - `spread`: with tempered steps of clients, how far the last local steps of a cohort led apart;
        where all clients make every step, 1 where they ran away and 0 elsewhere, twice.
    - `tempering`: a second share of the step, which fades in noise where x has a step size.
    """

    correction: PyTree
    known: PyTree | None = None
    share: Array | None = None
    agreement: Array | None = None
    facing: Facing | None = None
    momentum: PyTree | None = None
    spread: Array | None = None
    tempering: Tempering | None = None


class OneRound(AbstractLower):
    """S corrected local steps on y, then one projection ends the outer step (E3-AiPOD).

        y_hat <- y_hat - beta (grad_y g(x, y_hat; phi) - r),   S times from y_hat = y
        at the end of the outer step:   y <- project(y_hat - beta S r, x)
                                        r <- r + (y - y_hat) / (beta S)

    This is ProxSkip that projects exactly once, p = 1 / S. In a federation y shares the round of x,
    and the adjoint is found at the clients' own y_hat. With all clients present it is SCAFFOLD
    (option II; Karimireddy et al., ICML 2020) with r as the control variate; but with `Curvature`
    as the step size r then moves further, see `relaxation`.

    **Arguments:**

    - `lr` [beta]: the step size, at most 1 / l_g1.
    - `steps` [S]: local steps per outer step.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, "float8" for 8 and "float4"
        for 4, with error feedback.
    - `optimizer`: moves y by start + optimiser(start - y) with y as above, in a federation or on a
        `Free` set. By default `restarted_momentum()` in a federation, and nothing elsewhere;
        `optax.sgd(1.0)` for nothing in a federation either.
    - `relaxation`: how many times (y - y_hat) / (beta S) the correction moves, above 0 and below 2;
        on sets without bounds. By default up to 1.5 where the step size is a tempered `Curvature`
        and a round is the mean of all clients: less where noise shortens the steps, and where the
        second half of the local steps still leads about as far as the first. 1 elsewhere.

    !!! example
        ```python
        lower = aipod.OneRound(lr=0.01, steps=20)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=20)
    compression: str | None = eqx.field(static=True, default=None)
    optimizer: optax.GradientTransformation | None = None
    relaxation: float | Array | None = None

    def __check_init__(self) -> None:
        check_lr(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")
        check_compression(self.compression)
        check_mover(self.optimizer, "lower_optimizer")
        if self.relaxation is not None:
            check_relaxation(self.relaxation)

    @property
    def wire(self) -> str | None:
        return self.compression

    @property
    def draws(self) -> int:
        return self.steps

    @property
    def single(self) -> bool:
        return self.steps == 1

    @property
    def deferred(self) -> bool:
        return True

    @property
    def _tempered(self) -> bool:
        return is_tempered(self.lr)

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        problem.lower_set.check_corrections(y, name="lower_set")
        # What the server knows of each client at first: the start, which all share.
        known = None if self.compression is None or problem.part < 1 else y
        facing = nothing_faced(problem.lower_set, x, y)
        if facing is not None and self.relaxation is not None:
            raise ValueError(
                "relaxation= is for lower levels without bounds, whose corrections are also their "
                "multipliers: leave it out."
            )
        state = OneRoundState(optax.tree.zeros_like(y), known, facing=facing)
        if (mover := self._mover(problem.lower_set)) is not None:
            state = dataclasses.replace(state, momentum=mover.init(y))
        if not self._tempered:
            return state
        one = jnp.ones(problem.lower_set.apart, jnp.result_type(*jax.tree.leaves(y)))
        spread = jnp.ones(2, one.dtype) if problem.lower_set.together else None
        tempering = Tempering.first(self.lr, problem.lower_set, y)
        return dataclasses.replace(
            state, share=one, agreement=one, spread=spread, tempering=tempering
        )

    def common(self, problem: Bilevel) -> bool:
        return True

    def own(self, state: PyTree) -> PyTree:
        mask = jax.tree.map(lambda _: False, state)
        mine = jax.tree.map(lambda _: True, state.correction)
        return eqx.tree_at(lambda s: s.correction, mask, mine)

    def faced(self, problem: Bilevel, state: PyTree) -> Bilevel:
        return on_face(problem, state.facing)

    def seen_from(self, faced: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        # y_hat is not projected yet. Where x moves the bounds, r lags behind their multipliers, and
        # y_hat is far beyond active bounds: f there would say nothing about f on them.
        return cast_like(faced.lower_set.pin(y, x), y)

    def _mover(self, lower_set: AbstractSet) -> Mover | None:
        default = restarted_momentum()
        return Mover.of("lower_optimizer", self.optimizer, lower_set, default)

    def share(self, state: PyTree) -> Array | float:
        if state.share is None:
            return 1.0
        return state.share if state.tempering is None else state.share * state.tempering.share

    def ran_away(self, state: PyTree) -> Array | None:
        return None if state.spread is None else state.spread[0] > 0

    def _next_share(self, state: OneRoundState) -> Array | None:
        if state.share is None or state.agreement is None:
            return None
        outer = 1.0 if state.tempering is None else state.tempering.share
        return tempered(state.share, state.agreement, balance=balance_within(outer))

    def _lr(self, state: OneRoundState, rates: Rates) -> Array:
        return rates(self.lr) * self.share(state)

    def _relaxed(self, lower_set: AbstractSet, state: OneRoundState, moved: PyTree) -> PyTree:
        """The correction moved further than to `moved`.

        In a direction of curvature h a round takes away the share (1 - (1 - beta h)^S) / (S beta h)
        of its error. That is only 1 / S of it where beta h = 1, where local steps settle at once;
        all of it where g is flat, and more than all where g bends down, where they go on and on.
        """
        factor: Any = self.relaxation
        if factor is None:
            if state.agreement is None or not lower_set.averages:
                return moved
            # R is 2 where the second half of the local steps goes as far as the first one, 1 where
            # they have settled before it, and less only in noise.
            # Not by `jnp.interp`, which searches in a loop.
            calm = (state.agreement - _NOISE) / (_CALM - _NOISE)
            settled = (_GOING_ON - state.agreement) / (_GOING_ON - _SETTLED)
            settled = jnp.clip(jnp.minimum(calm, settled), 0.0, 1.0)
            factor = 1 + (_RELAXED - 1) * self.share(state) * settled
        factor = jnp.asarray(factor)
        return jax.tree.map(
            lambda a, b: (a + beside(factor - 1, a) * (a - b)).astype(a.dtype),
            moved,
            state.correction,
        )

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        shared = None if state.facing is None else state.facing.shared
        middle, end, memory = local_steps(
            lower_oracle(turn, self.steps),
            turn.y,
            with_shared(state.correction, shared),
            lr=self._lr(state, turn.rates),
            steps=self.steps,
            key=turn.key,
            memory=turn.memory,
        )
        if self._tempered:
            lower_set = turn.problem.lower_set
            agreed, away = agreement(lower_set, turn.y, middle, end)
            state = dataclasses.replace(state, agreement=agreed.astype(state.share.dtype))
            if state.spread is not None and not lower_set.apart:
                if lower_set.cohorts:
                    spread = spread_of(lower_set, turn.y, end)
                else:
                    spread = jnp.broadcast_to(away, state.spread.shape)
                state = dataclasses.replace(state, spread=spread.astype(state.share.dtype))
        cost = turn.lower_cost(1, lower_draws=self.steps, deferred=True, memory=memory)
        return end, state, cost

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        lr, lower_set, facing = self._lr(state, turn.rates), turn.lower_set, state.facing
        share = self._next_share(state)
        how: dict[str, Any] = {
            "lr": lr,
            "probability": 1 / self.steps,
            "compression": self.compression,
            "key": turn.round_key,
            "begun": turn.start,
        }
        before = (turn.y, state.correction)
        if facing is None:
            y, moved, known = settle(lower_set, *before, state.known, **how)
            correction = self._relaxed(lower_set, state, moved)
        else:
            y, correction, met, known = land(lower_set, *before, facing.met(), state.known, **how)
            facing = facing.after(turn, y, met, 1, lr=lr, steps=jnp.asarray(self.steps))
        if share is not None and lower_set.cohorts:
            way = jax.tree.map(lambda new, old: new[:1] - old[:1], y, turn.start)
            share = jnp.minimum(share, calmed(state.share, state.spread, way))
        tempering, momentum = state.tempering, state.momentum
        if (mover := self._mover(lower_set)) is not None:
            y, momentum = mover(turn.start, y, momentum)
            if lower_set.agreement is not None:
                # Momentum leads out of a set within which clients agree.
                y = cast_like(lower_set.alone(y), y)
        if tempering is not None and turn.moves is None and is_random(turn.problem.lower_samples):
            points = one_of(lower_set, turn.start), one_of(lower_set, y)
            tempering = tempering.after(*points, step=turn.step, paced=False)
        return y, OneRoundState(
            correction, known, share, state.agreement, facing, momentum, state.spread, tempering
        )
