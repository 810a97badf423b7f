"""FedMBO's adjoint: Neumann series that wander from client to client."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.keys import round_key, subkey
from aipod._misc.tree import axpy, cast_like, scaled
from aipod.problem import Bilevel
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, healthy
from aipod.stepsize import Curvature, StepSize, beside, check_lr, check_steps


class PassedSeries(AbstractAdjoint):
    """As many Neumann series as clients, each of whose factors is another client's (FedMBO).

        v_0 = grad_y f_m,   v_n = (I - eta G_m) v_{n-1},   z = eta sum_{n < N} v_n

    with clients m drawn anew for every factor: in every round a random permutation hands each
    series to another client, and once more before x sees it. So each z has the mean of the series
    of all clients, although no client knows their Hessian, and no vector is averaged. With `random`
    every series has an N' of its own, uniform in {0, ..., N - 1}, and z = eta N v_{N'}. Series that
    have ended wait for the longest; rounds and messages are counted as those of the longest.

    **Arguments:**

    - `steps` [N]: the number of terms.
    - `lr` [eta]: at most 1 / l_g1, the largest curvature of any client.
    - `random`: random numbers of factors instead of the sum.

    !!! example
        ```python
        adjoint = PassedSeries(steps=5, lr=0.1)
        ```
    """

    steps: int = eqx.field(static=True, default=5)
    lr: StepSize = Curvature()
    random: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_lr(self.lr, "adjoint_lr")

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps - 1, 0

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        # Refuses, before anything is compiled, federations that cannot do this.
        jax.eval_shape(lambda v: problem.lower_set.pass_on(v, jax.random.key(0)), y)
        return healthy(y, problem.lower_set)

    def health(self, state: PyTree) -> Health | None:
        return state

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        y, key, eta = turn.y, turn.key, turn.lr(self.lr)
        lower_set, hessian = turn.problem.lower_set, turn.hessian_product(self.steps)

        def passed(n: Array | int, v: PyTree) -> PyTree:
            return lower_set.pass_on(v, round_key(key, n))

        def factor(n: Array, v: PyTree) -> PyTree:
            return cast_like(axpy(v, -eta, hessian(v, subkey(key, n))), y)

        first = cast_like(turn.upper_gradient_y(upper_batch), y)
        if self.random:
            rows = jax.tree.leaves(first)[0].shape[:1]
            each = jax.random.randint(subkey(key, 0), rows, 0, self.steps)
            factors = jnp.max(each)

            def further(n: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
                # A series takes its number along.
                v, each = passed(n, carry)
                new = factor(n, v)
                kept = jax.tree.map(lambda a, b: jnp.where(beside(n <= each, a), a, b), new, v)
                return kept, each

            last, _ = jax.lax.fori_loop(1, factors + 1, further, (first, each))
            z = scaled(eta * self.steps, last)
            sent = factors + 1
        else:
            factors = jnp.asarray(self.steps - 1, jnp.int32)

            def body(n: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                # A series takes its sum so far along.
                v, total = passed(n, carry)
                v = factor(n, v)
                return v, optax.tree.add(total, v)

            _, total = jax.lax.fori_loop(1, self.steps, body, (first, first))
            z = scaled(eta, total)
            # v_0 is its own sum, and after the last factor only the sum goes on.
            sent = jnp.asarray(max(1, 2 * self.steps - 2), jnp.int32)
        z = cast_like(passed(self.steps, z), y)
        spent = turn.lower_cost(lower_draws=factors)
        rounds, vectors = rounds_of(lower_set, factors + 1), rounds_of(lower_set, sent)
        return z, state, Cost(0, 0, spent.lower_samples, rounds=rounds, sent_y=vectors)
