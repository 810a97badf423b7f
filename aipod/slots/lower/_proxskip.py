"""How y follows x: the lower slot."""

import abc
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkey
from aipod._misc.tree import axpy, cast_like
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._compression import check_compression
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._proxskip import (
    check_probability,
    local_steps,
    proxskip,
    settle,
    step_keys,
)
from aipod.slots._turn import Turn
from aipod.stepsize._stepsize import Curvature, Rates, StepSize, check_rate, check_steps
from aipod.stepsize._tempering import agreement, tempered


class AbstractLower(eqx.Module):
    """The slot that moves y towards y*(x) while x is fixed."""

    lr: eqx.AbstractVar[StepSize]

    @abc.abstractmethod
    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """What is kept besides y from one outer step to the next."""

    @abc.abstractmethod
    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        """The next y, the next state, and what it cost."""

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    @property
    def draws(self) -> int:
        """Batches of the lower level that one outer step draws, as far as that is known."""
        return 0

    @property
    def deferred(self) -> bool:
        """Whether the projection is left to `settle`, at the end of the outer step."""
        return False

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        """y and the state after the projection that was left to the end of the outer step."""
        return turn.y, state


class ProjectedSGD(AbstractLower):
    """S projected stochastic gradient steps (`update-ys`).

        y <- project(y - beta grad_y g(x, y; phi), x)

    **Arguments:**

    - `lr` [beta]: the step size.
    - `steps` [S]: steps per outer step, each on a fresh sample.

    !!! example
        ```python
        lower = aipod.ProjectedSGD(lr=0.01, steps=5)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")

    @property
    def draws(self) -> int:
        return self.steps

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return None

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        rate = rates(self.lr)
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=self.steps)

        def body(point: PyTree, draw_key: PRNGKeyArray) -> tuple[PyTree, None]:
            gradient = jax.grad(objective)(point, draw(samples, draw_key))
            chosen = lower_set.for_round(subkey(draw_key, 1))
            new = chosen.project(axpy(point, -rate, lower_set.riesz(gradient)))
            return cast_like(new, point), None

        y, _ = jax.lax.scan(body, y, step_keys(key, self.steps)[1])
        spent = self.steps * batch_size(problem.lower_samples)
        rounds = rounds_of(lower_set, self.steps)
        cost = Cost(self.steps, lower_samples=spent, rounds=rounds, sent_y=rounds)
        return y, state, cost


class ProxSkipState(eqx.Module):
    """What ProxSkip keeps besides y.

    The correction r; with compression what the server knows of each client; and for tempered steps
    the share of the curvature's step in force, and how far the last local steps agreed.
    """

    correction: PyTree
    known: PyTree | None = None
    share: Array | None = None
    agreement: Array | None = None


class ProxSkip(AbstractLower):
    """S corrected stochastic gradient steps, few of them projected.

        y_hat = y - beta (grad_y g(x, y; phi) - r)                                    (`update-z`)
        with probability p:  y <- project(y_hat - (beta / p) r, x)                  (`update-yz1`)
                             r <- r + (p / beta) (y - y_hat)                        (`update-yz2`)
        otherwise:           y <- y_hat

    r and y are carried over from one outer step to the next; r tends to grad_y g(x, y*(x)), so
    the skipped projections leave no error behind.

    **Arguments:**

    - `lr` [beta]: the step size, at most 1 / l_g1: the skipped steps see the whole space.
    - `steps` [S]: steps per outer step.
    - `prob` [p]: how often to project. None stands for exactly once, p = 1 / S, at the end of the
        outer step: in a federation y then shares the round of x, and the adjoint is found at the
        clients' own y_hat (E3-AiPOD).
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, with `prob=None` only.

    !!! example
        ```python
        lower = aipod.ProxSkip(lr=0.01, steps=5, prob=0.3)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)
    prob: float | None = 0.3
    compression: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")
        check_probability(self.prob, "lower_prob (p)")
        check_compression(self.compression, self.prob)

    @property
    def wire(self) -> str | None:
        return self.compression

    @property
    def draws(self) -> int:
        return self.steps

    @property
    def deferred(self) -> bool:
        return self.prob is None

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        # What the server knows of each client at first: the start, which all share.
        known = None if self.compression is None else y
        state = ProxSkipState(optax.tree.zeros_like(y), known)
        if not self._tempered:
            return state
        one = jnp.ones((), jnp.result_type(*jax.tree.leaves(y)))
        return dataclasses.replace(state, share=one, agreement=one)

    @property
    def _tempered(self) -> bool:
        return self.deferred and isinstance(self.lr, Curvature) and self.lr.tempered

    def _rate(self, state: ProxSkipState, rates: Rates) -> Array:
        return rates(self.lr) if state.share is None else rates(self.lr) * state.share

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=self.steps)

        def gradient(point: PyTree, draw_key: PRNGKeyArray) -> PyTree:
            return lower_set.riesz(jax.grad(objective)(point, draw(samples, draw_key)))

        spent = self.steps * batch_size(problem.lower_samples)
        if self.prob is None:
            middle, end = local_steps(
                gradient,
                y,
                state.correction,
                rate=self._rate(state, rates),
                steps=self.steps,
                key=key,
            )
            if self._tempered:
                agreed = agreement(lower_set, y, middle, end).astype(state.share.dtype)
                state = dataclasses.replace(state, agreement=agreed)
            return end, state, Cost(1, lower_samples=spent, sent_y=rounds_of(lower_set, 1))
        y, correction, projections = proxskip(
            gradient,
            lower_set,
            y,
            state.correction,
            rate=rates(self.lr),
            probability=self.prob,
            steps=self.steps,
            key=key,
        )
        rounds = rounds_of(lower_set, projections)
        cost = Cost(projections, lower_samples=spent, rounds=rounds, sent_y=rounds)
        return y, ProxSkipState(correction), cost

    def settle(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        problem, x, y, rates, key = turn
        if self.prob is not None:
            return y, state
        y, correction, known = settle(
            problem.lower_set.at(x),
            y,
            state.correction,
            state.known,
            rate=self._rate(state, rates),
            probability=1 / self.steps,
            compression=self.compression,
            key=key,
        )
        share = tempered(state.share, state.agreement) if self._tempered else None
        return y, ProxSkipState(correction, known, share, state.agreement)
