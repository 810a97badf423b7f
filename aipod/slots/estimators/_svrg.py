"""Loopless SVRG: corrections by a full derivative at an anchor."""

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from aipod._misc.keys import coins
from aipod._misc.tree import is_concrete
from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, drift
from aipod.stepsize import check_positive


class _Anchor(eqx.Module):
    """A point, and the derivative there on all data."""

    point: PyTree
    full: PyTree


class LooplessSVRG(AbstractEstimator):
    """The change since an anchor, on a minibatch, added to the full derivative there.

        d = g_i(point) - g_i(anchor) + g(anchor)
        with probability p (and in the first draw), before that:   anchor <- point

    (Kovalev, Horvath and Richtarik, ALT 2020.) Unbiased, with a variance that goes to 0 as point
    and anchor converge. Two derivatives in a draw, and a pass over all data with probability p;
    memory of two points.

    **Arguments:**

    - `prob` [p]: how often the anchor moves; by default once in an epoch on average.

    !!! example
        ```python
        solver = aipod.E3AiPOD(estimator=aipod.LooplessSVRG(prob=0.1), upper_lr=0.1)
        ```
    """

    prob: float | None = None

    def __check_init__(self) -> None:
        if self.prob is not None:
            check_positive(self.prob, "prob")
            if is_concrete(self.prob) and self.prob > 1:
                raise ValueError(
                    f"prob must be at most 1, got {self.prob}: 1 moves the anchor in every draw."
                )

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        return _Anchor(optax.tree.zeros_like(point), optax.tree.zeros_like(like))

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        prob = 1 / (oracle.pieces or 1) if self.prob is None else self.prob
        moves = coins(oracle.key, prob, 1)[0] | oracle.first
        anchor = jax.lax.cond(moves, lambda: _Anchor(point, oracle.full(point)), lambda: memory)
        value = drift(oracle.drawn(point), oracle.drawn(anchor.point), anchor.full)
        return Estimate(value, anchor, 2, moves)

    @property
    def finite(self) -> bool:
        return True
