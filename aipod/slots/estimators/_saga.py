"""SAGA: a table of the last derivative of every fixed minibatch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, beside, drift


class _Table(eqx.Module):
    """One row for each fixed minibatch, and the mean of the rows."""

    rows: PyTree
    mean: PyTree


class SAGA(AbstractEstimator):
    """The newest derivative of one minibatch, with the last ones of all (Defazio et al., 2014).

        d = g_i(point) - T_i + mean(T),   then   T_i <- g_i(point)

    with i the minibatch that was drawn out of m and T a table of m rows, 0 at first. Unbiased for
    every table where i is drawn uniformly; where the iterates converge, so do the rows, and the
    variance goes to 0. One derivative in a draw, m times the memory of a point. The table is
    updated in place: a step does not copy it. With `batch_size=1` it has a row for each example.

    !!! example
        ```python
        solver = aipod.E3AiPOD(estimator=aipod.SAGA(), upper_lr=0.1)
        ```
    """

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        def rows(leaf: Array) -> Array:
            shape = leaf.shape
            shape = (shape[0], pieces, *shape[1:]) if by_client else (pieces, *shape)
            return jnp.zeros(shape, leaf.dtype)

        return _Table(jax.tree.map(rows, like), optax.tree.zeros_like(like))

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        new, number = oracle.drawn(point), oracle.number
        if number is None:
            raise ValueError("SAGA needs the number of the minibatch that was drawn.")
        place = (number,) if number.ndim == 0 else (jnp.arange(number.shape[0]), number)
        old = jax.tree.map(lambda rows: rows[place], memory.rows)
        value = drift(new, old, memory.mean)
        rows = jax.tree.map(
            lambda rows, leaf: rows.at[place].set(leaf.astype(rows.dtype)), memory.rows, new
        )
        # A client with fewer minibatches than the largest has rows that stay 0 and are not counted.
        mean = jax.tree.map(
            lambda m, a, b: (m + _share(oracle, a) * (a - b)).astype(m.dtype), memory.mean, new, old
        )
        return Estimate(value, _Table(rows, mean))

    @property
    def finite(self) -> bool:
        return True


def _share(oracle: Oracle, leaf: Array) -> Array:
    """1 / m, for each client its own."""
    sizes = jnp.asarray(1 if oracle.sizes is None else oracle.sizes)
    return beside(1 / sizes, leaf)
