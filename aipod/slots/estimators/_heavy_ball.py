"""Moving averages, the heavy ball of MA-SOBA."""

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from aipod._misc.tree import cast_like
from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, check_weight, chosen
from aipod.stepsize import StepSize


class HeavyBall(AbstractEstimator):
    """A moving average of the derivatives that were drawn.

        d <- (1 - a) d + a g_i(point),   d = g_i(point) in the first draw

    Biased: d is the mean derivative over the last 1 / a points. Its variance is about a / 2 of that
    of g_i. One derivative in a draw, memory of one point. The heavy-ball method is a plain step
    along such a d.

    **Arguments:**

    - `weight` [a]: a number in (0, 1], or an Optax schedule of the outer step.

    !!! example
        ```python
        upper = aipod.HeavyBall(0.1)
        solver = aipod.SOBA(upper_lr=0.1, estimator=aipod.Estimators(upper=upper))
        ```
    """

    weight: StepSize = 0.1

    def __check_init__(self) -> None:
        check_weight(self.weight, "weight (a)")

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        return optax.tree.zeros_like(like)

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        share = jnp.minimum(oracle.rates(self.weight), 1.0)
        new = oracle.drawn(point)
        moved = optax.tree.add(memory, optax.tree.scale(share, optax.tree.sub(new, memory)))
        value = chosen(oracle.before == 0, new, cast_like(moved, new))
        return Estimate(value, value)
