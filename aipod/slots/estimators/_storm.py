"""STORM: a recursive momentum that needs no pass over all data."""

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from aipod._misc.tree import cast_like
from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, check_weight, chosen
from aipod.slots.estimators._sarah import _Followed
from aipod.stepsize import StepSize


class STORM(AbstractEstimator):
    """The last estimate, moved to the new point on a fresh batch, and a share of that batch.

        d <- g_i(point) + (1 - a) (d - g_i(last point)),   d = g_i(point) in the first draw

    (Cutkosky and Orabona, NeurIPS 2019.) Its bias given the past is (1 - a) times the error of the
    last d; over all batches since the start the mean is right. For streams: it needs no finite sum.
    Two derivatives in a draw, memory of two points.

    **Arguments:**

    - `weight` [a]: a number in (0, 1], or an Optax schedule of the outer step.

    !!! example
        ```python
        solver = aipod.E3AiPOD(estimator=aipod.STORM(0.1), upper_lr=0.1)
        ```
    """

    weight: StepSize = 0.1

    def __check_init__(self) -> None:
        check_weight(self.weight, "weight (a)")

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        return _Followed(optax.tree.zeros_like(point), optax.tree.zeros_like(like))

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        kept = 1 - jnp.minimum(oracle.rates(self.weight), 1.0)
        new = oracle.drawn(point)
        error = optax.tree.sub(memory.value, oracle.drawn(memory.point))
        moved = cast_like(optax.tree.add(new, optax.tree.scale(kept, error)), new)
        value = chosen(oracle.before == 0, new, moved)
        return Estimate(value, _Followed(point, value), 2)
