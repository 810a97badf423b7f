"""The Neumann series: the adjoint of AiPOD and E-AiPOD."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.keys import subkey
from aipod._misc.tree import axpy, cast_like, inner, scaled
from aipod.problem import Bilevel, draw, is_noisy
from aipod.slots._asking import hessian_oracle, slope_oracle
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy, pull_of
from aipod.slots.adjoint._stray import Straying
from aipod.stepsize import (
    Curvature,
    StepSize,
    adapts,
    beside,
    check_lr,
    check_not_negative,
    check_steps,
)

# A curvature along a term, in units of 1 / eta, that counts as 0; below minus that g is not convex.
_DOWN = 1e-3
# Terms made for the curvature do not grow. Where the residual of a warm series does, so many times,
# the curvature has grown since it was looked at, as where y has just come near the edge of a
# logarithm: then the z of the step before has to do.
_GREW = 100.0
# The squared size of a term, relative to the first one, at which a series is done.
_DONE = 1e-12


# The number of a term and a vector -> a vector.
_Along = Callable[[Any, PyTree], PyTree]


class WarmSeries(eqx.Module):
    """What a warm series keeps: z, how the last solve went, and whether z begins to stray."""

    z: PyTree
    health: Health
    straying: Straying


class Neumann(AbstractAdjoint):
    """A truncated Neumann series, projected after every factor (`NS-wk`).

        v_0 = P grad_y f,   v_n = P (v_{n-1} - eta G v_{n-1}),   z = eta sum_{n < N} v_n

    every factor with a fresh sample. With `random`, the paper's own estimate: N' uniform in
    {0, ..., N - 1} and z = eta N v_{N'}, unbiased for the sum and about half its cost, at many
    times its variance.

    With `warm` the series goes on from the z of the outer step before, by N - 1 terms
    z <- z + eta P (grad_y f - G z), each with a fresh sample of both levels. So the error of a
    series that is too short dies out from one outer step to the next. An old z that leaves a
    much larger residual than none is given up: z stays bounded where g is not convex.

    **Arguments:**

    - `steps` [N]: the number of terms.
    - `lr` [eta = c~ / l_g1]: at most 1 / l_g1, the largest curvature of g.
    - `random`: the paper's random draw instead of the sum.
    - `damping`: a Tikhonov term, G + damping I, for lower levels that are not convex.
    - `local`: leave every projection out. In a federation each client then inverts its own
        Hessian, without communication and, where clients differ, with a bias.
    - `warm`: go on from the z of the outer step before.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Neumann(50))
        ```
    """

    steps: int = eqx.field(static=True, default=10)
    lr: StepSize = Curvature()
    random: bool = eqx.field(static=True, default=False)
    damping: float = 0.0
    local: bool = eqx.field(static=True, default=False)
    warm: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_lr(self.lr, "adjoint_lr")
        check_not_negative(self.damping, "damping")
        if self.warm and (self.random or self.steps == 1):
            raise ValueError(
                "Neumann: warm=True adds a sum of terms to an old z, so it needs random=False and "
                "at least 2 steps: change these, or leave warm out."
            )

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps - 1, self.steps - 2 if self.warm else 0

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        health = healthy(y, problem.lower_set)
        if not self.warm:
            return health
        return WarmSeries(optax.tree.zeros_like(y), health, Straying.first(health.left))

    def health(self, state: PyTree) -> Health | None:
        return state.health if self.warm else state

    def own(self, state: PyTree) -> PyTree:
        # A series that is projected leads to the same z everywhere.
        return self.own_health(jax.tree.map(lambda _: self.local, state))

    def remedy(self, off: float) -> str:
        more = 100 * self.steps
        if 0 < off < 1:
            # The terms shrink by a constant factor; from here on to 1 % of z.
            more = math.ceil(self.steps * max(1.2, math.log(1e-2) / math.log(off)))
        return (
            f"take adjoint_steps={more} or so, or a method without this bias: aipod.E3AiPOD, or "
            "aipod.ConjugateGradient()."
        )

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        y, key, eta = turn.y, turn.key, turn.lr(self.lr)
        lower_set = turn.problem.lower_set
        hessian = turn.hessian_product(self.steps)

        def average(n: Array | int, v: PyTree) -> PyTree:
            if self.local:
                return cast_like(v, y)
            chosen = lower_set.for_round(subkey(key, self.steps + n))
            return cast_like(chosen.tangent(v), y)

        def product(n: Array | int, v: PyTree) -> PyTree:
            image = hessian(v, subkey(key, n))
            return optax.tree.add_scale(image, self.damping, v) if self.damping else image

        def factor(n: Array, v: PyTree) -> PyTree:
            return average(n, axpy(v, -eta, product(n, v)))

        if self.warm and turn.memory is not None:
            return self._estimated(turn, state, average)
        first = average(0, turn.upper_gradient_y(upper_batch))
        if self.warm:
            return self._gone_on(turn, first, state, product, average)
        before = first
        if self.random:
            factors = jax.random.randint(subkey(key, 0), (), 0, self.steps)
            last = jax.lax.fori_loop(1, factors + 1, factor, first)
            z = scaled(eta * self.steps, last)
        else:
            factors = jnp.asarray(self.steps - 1, jnp.int32)

            def body(n: Array, carry: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
                v = factor(n, carry[0])
                return v, optax.tree.add(carry[1], v), carry[0]

            start = (first, first, first)
            last, total, before = jax.lax.fori_loop(1, self.steps, body, start)
            z = scaled(eta, total)
        state = self._seen(turn, first, before, last, z)
        projections = 0 if self.local else factors + 1
        cost = turn.lower_cost(projections, lower_draws=factors)
        return cast_like(z, y), state, cost

    def _gone_on(
        self, turn: Turn, right: PyTree, state: WarmSeries, product: _Along, average: _Along
    ) -> tuple[PyTree, PyTree, Cost]:
        """The warm series, from the projected right-hand side and the old z."""
        y, old, eta = turn.y, state.z, turn.lr(self.lr)
        problem, lower_set = turn.problem, turn.problem.lower_set
        slope_keys = subkey(turn.key, 0)
        upper, upper_samples = problem.upper_at(turn.x, self.steps)

        def size(a: PyTree, b: PyTree) -> Array:
            return inner(a, b, per_client=lower_set.per_client)

        image = average(1, product(1, old))
        residual = optax.tree.sub(right, image)
        noisy = is_noisy(problem)
        # Where an answer is still missing over a network, sizes are NaN, and z must become NaN too.
        stray, straying = state.straying.after(
            size(residual, residual), size(right, right), noisy=noisy
        )
        bent = size(old, image) < -_DOWN * jnp.sqrt(size(old, old) * size(image, image))

        def unless(a: Array, b: Array) -> Array:
            return jnp.where(beside(stray, a), b, a)

        z = jax.tree.map(unless, old, optax.tree.zeros_like(old))
        last = jax.tree.map(unless, residual, right)
        z = axpy(z, eta, last)

        def body(n: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            z, _ = carry
            slope = jax.grad(upper)(y, draw(upper_samples, subkey(slope_keys, n)))
            left = optax.tree.sub(lower_set.riesz(slope), product(n, z))
            left = average(n, left)
            return axpy(z, eta, left), left

        begun = z
        z, last = jax.lax.fori_loop(2, self.steps, body, (z, last))
        if adapts(self.lr):
            longest = jnp.maximum(size(residual, residual), size(right, right))
            grew = size(last, last) > _GREW**2 * longest

            def unless_grown(new: Array, before: Array, one: Array) -> Array:
                known = beside(size(old, old) > 0, new)
                return jnp.where(beside(grew, new), jnp.where(known, before, one), new)

            z = jax.tree.map(unless_grown, z, old, begun)
        left, whole = size(last, last), size(right, right)
        if noisy:
            # With noise a residual says more about the sample than about z.
            left = whole = jnp.zeros_like(left)
        pull = pull_of(size(old, image), size(old, old), eta * self.steps)
        health = health_of(y, lower_set, left, whole, bent, pull)
        projections = 0 if self.local else self.steps
        lower_draws, upper_draws = self.draws
        cost = turn.lower_cost(projections, lower_draws=lower_draws, upper_draws=upper_draws)
        # The first two vectors do not wait for each other: in a federation they share a round.
        rounds = rounds_of(lower_set, max(projections - 1, 0))
        return z, WarmSeries(z, health, straying), dataclasses.replace(cost, rounds=rounds)

    def _estimated(
        self, turn: Turn, state: WarmSeries, average: _Along
    ) -> tuple[PyTree, PyTree, Cost]:
        """The warm series with estimated derivatives, always from the old z."""
        terms, eta = self.steps - 1, turn.lr(self.lr)
        slope_of, product_of = slope_oracle(turn, terms), hessian_oracle(turn, terms)
        slope_keys = subkey(turn.key, 0)

        def body(n: Array, carry: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
            z, memory = carry
            slope, memory = slope_of(subkey(slope_keys, n), memory)
            product, memory = product_of(z, subkey(turn.key, n), memory)
            left = axpy(optax.tree.sub(slope, product), -self.damping, z)
            return axpy(z, eta, average(n, left)), memory

        z, memory = jax.lax.fori_loop(1, self.steps, body, (state.z, turn.memory))
        health = healthy(turn.y, turn.problem.lower_set)
        projections = 0 if self.local else terms
        cost = turn.lower_cost(projections, lower_draws=terms, upper_draws=terms, memory=memory)
        return z, WarmSeries(z, health, state.straying), cost

    def _seen(self, turn: Turn, first: PyTree, before: PyTree, last: PyTree, z: PyTree) -> Health:
        """The terms left out, had they gone on to shrink as the last one did."""
        lower_set = turn.problem.lower_set
        if self.random or self.steps == 1:
            return healthy(turn.y, lower_set)

        def size(v: PyTree, other: PyTree) -> Array:
            return inner(v, other, per_client=lower_set.per_client)

        def quotient(a: Array, b: Array) -> Array:
            return a / jnp.where(b > 0, b, 1.0)

        right, whole = size(first, first), size(before, before)
        # eta v' G v / v' v; what rounding leaves of a series that is done says nothing.
        done = whole <= _DONE * right
        curvature = jnp.where(done, 1.0, 1 - quotient(size(before, last), whole))
        rest = jnp.maximum(1 - curvature, 0.0) / jnp.maximum(curvature, _DOWN)
        missing = quotient(size(last, last), size(z, z)) * (turn.lr(self.lr) * rest) ** 2
        return health_of(turn.y, lower_set, missing * right, right, curvature < -_DOWN)
