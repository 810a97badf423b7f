"""SARAH, also called SPIDER: an estimate that follows the point from one draw to the next."""

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, drift
from aipod.stepsize import check_steps


class _Followed(eqx.Module):
    """The last point, and the estimate there."""

    point: PyTree
    value: PyTree


class SARAH(AbstractEstimator):
    """The change since the last draw, on a minibatch, added to the last estimate.

        d <- g(point)                                every q-th draw, the first among them
        d <- d + g_i(point) - g_i(last point)        else

    (Nguyen et al., ICML 2017; SPIDER: Fang et al., NeurIPS 2018.) Not unbiased: given the past,
    the mean of d is off by what d was off before, E d - g(point) = d_last - g(last point); over all
    batches since the last full derivative the mean is right. The error goes to 0 as the point
    converges. Two derivatives in a draw, a pass over all data every q-th time.

    **Arguments:**

    - `period` [q]: draws from one full derivative to the next; by default those of an epoch.

    !!! example
        ```python
        solver = aipod.E3AiPOD(estimator=aipod.SARAH(period=16), upper_lr=0.1)
        ```
    """

    period: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if self.period is not None:
            check_steps(self.period, "period (q)")

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        return _Followed(optax.tree.zeros_like(point), optax.tree.zeros_like(like))

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        period = self.period or oracle.pieces or 1
        due = (oracle.clock % period == 0) | oracle.first

        def followed() -> PyTree:
            return drift(oracle.drawn(point), oracle.drawn(memory.point), memory.value)

        value = jax.lax.cond(due, lambda: oracle.full(point), followed)
        return Estimate(value, _Followed(point, value), 2 * (1 - due), due)

    @property
    def finite(self) -> bool:
        return True
