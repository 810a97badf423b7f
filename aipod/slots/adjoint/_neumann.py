"""The Neumann series: the adjoint of AiPOD and E-AiPOD."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.keys import subkey
from aipod._misc.tree import axpy, cast_like, inner
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy
from aipod.stepsize import Curvature, StepSize, check_lr, check_not_negative, check_steps

# A curvature along a term, in units of 1 / eta, that counts as 0; below minus that g is not convex.
_DOWN = 1e-3
# The squared size of a term, relative to the first one, at which a series is done.
_DONE = 1e-12


class Neumann(AbstractAdjoint):
    """A truncated Neumann series, projected after every factor (`NS-wk`).

        v_0 = P grad_y f,   v_n = P (v_{n-1} - eta G v_{n-1}),   z = eta sum_{n < N} v_n

    every factor with a fresh sample. With `random`, the paper's own estimate: N' uniform in
    {0, ..., N - 1} and z = eta N v_{N'}, unbiased for the sum and about half its cost, at many
    times its variance.

    **Arguments:**

    - `steps` [N]: the number of terms.
    - `lr` [eta = c~ / l_g1]: at most 1 / l_g1, the largest curvature of g.
    - `random`: the paper's random draw instead of the sum.
    - `damping`: a Tikhonov term, G + damping I, for lower levels that are not convex.
    - `local`: leave every projection out. In a federation each client then inverts its own
        Hessian, without communication and, where clients differ, with a bias.

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

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_lr(self.lr, "adjoint_lr")
        check_not_negative(self.damping, "damping")

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps - 1, 0

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return healthy(y, problem.lower_set)

    def health(self, state: PyTree) -> Health | None:
        return state

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

        first = average(0, turn.upper_gradient_y(upper_batch))

        def factor(n: Array, v: PyTree) -> PyTree:
            product = hessian(v, subkey(key, n))
            if self.damping:
                product = optax.tree.add_scale(product, self.damping, v)
            return average(n, axpy(v, -eta, product))

        before = first
        if self.random:
            factors = jax.random.randint(subkey(key, 0), (), 0, self.steps)
            last = jax.lax.fori_loop(1, factors + 1, factor, first)
            z = optax.tree.scale(eta * self.steps, last)
        else:
            factors = jnp.asarray(self.steps - 1, jnp.int32)

            def body(n: Array, carry: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
                v = factor(n, carry[0])
                return v, optax.tree.add(carry[1], v), carry[0]

            start = (first, first, first)
            last, total, before = jax.lax.fori_loop(1, self.steps, body, start)
            z = optax.tree.scale(eta, total)
        state = self._seen(turn, first, before, last, z)
        projections = 0 if self.local else factors + 1
        cost = turn.lower_cost(projections, lower_draws=factors)
        return cast_like(z, y), state, cost

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
