"""SAGA: a table of the last derivative of every fixed minibatch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from aipod.slots.estimators._base import AbstractEstimator, Estimate, Oracle, beside, drift
from aipod.stepsize import check_positive


class _Table(eqx.Module):
    """One row for each fixed minibatch, and the mean of the rows."""

    rows: PyTree
    mean: PyTree


def _as_number(weight: Any) -> Any:
    """The number in an array as one of Python: a static field is compared and hashed."""
    return weight.tolist() if isinstance(weight, jax.Array | np.ndarray) else weight


class SAGA(AbstractEstimator):
    """The newest derivative of one minibatch, with the last ones of all (Defazio et al., 2014).

        d = g_i(point) - T_i + mean(T),   then   T_i <- g_i(point)

    with i the minibatch that was drawn out of m and T a table of m rows, 0 at first. Unbiased for
    every table where i is drawn uniformly; where the iterates converge, so do the rows, and the
    variance goes to 0. One derivative in a draw, m times the memory of a point. The table is
    updated in place: a step does not copy it. With `batch_size=1` it has a row for each example.

    With `weight` [theta] below 1 the newest derivative counts less:

        d = theta (g_i(point) - T_i) + mean(T)

    Its noise is theta times that of SAGA, so longer steps are stable. The bias,
    (1 - theta) (mean(T) - g(point)), goes to 0 as the point converges. theta = 1 / m is SAG
    (Schmidt, Le Roux and Bach, 2017); at 1/2 or more, old rows never outweigh the new one.

    **Arguments:**

    - `weight` [theta]: of what is new in the minibatch, in (0, 1].

    !!! example
        ```python
        solver = aipod.E3AiPOD(estimator=aipod.SAGA(), upper_lr=0.1)
        ```
    """

    weight: float = eqx.field(static=True, default=1.0, converter=_as_number)

    def __check_init__(self) -> None:
        check_positive(self.weight, "weight (theta)")
        if self.weight > 1:
            raise ValueError(f"weight (theta) must be at most 1, which is SAGA, got {self.weight}.")

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
        # A condition that always holds keeps XLA from reading the row where it is used, after it
        # has been written: for that it would copy the whole table in every step.
        old = jax.lax.cond(
            jnp.all(number >= 0),
            lambda: jax.tree.map(lambda rows: _row(rows, number), memory.rows),
            lambda: optax.tree.zeros_like(memory.mean),
        )
        value = drift(new, old, memory.mean) if self.weight == 1 else self._partly(new, old, memory)
        # Written after it was read, which the difference of 0 makes sure of.
        fresh = jax.tree.map(lambda a, b: a + (b - b), new, old)
        rows = jax.tree.map(lambda rows, leaf: _with_row(rows, number, leaf), memory.rows, fresh)
        # A client with fewer minibatches than the largest has rows that stay 0 and are not counted.
        mean = jax.tree.map(
            lambda m, a, b: (m + _share(oracle, a) * (a - b)).astype(m.dtype), memory.mean, new, old
        )
        return Estimate(value, _Table(rows, mean))

    def _partly(self, new: PyTree, old: PyTree, memory: _Table) -> PyTree:
        return jax.tree.map(
            lambda a, b, m: (m + self.weight * (a - b)).astype(m.dtype), new, old, memory.mean
        )

    @property
    def finite(self) -> bool:
        return True


def _row(rows: Array, number: Array) -> Array:
    """The row of a minibatch; of each client its own."""
    if number.ndim:
        return jax.vmap(_row)(rows, number)
    return jax.lax.dynamic_index_in_dim(rows, number, keepdims=False)


def _with_row(rows: Array, number: Array, leaf: Array) -> Array:
    """The table with this row in place of the old one."""
    leaf = leaf.astype(rows.dtype)
    if number.ndim:
        return rows.at[jnp.arange(number.shape[0]), number].set(leaf)
    return jax.lax.dynamic_update_index_in_dim(rows, leaf, number, 0)


def _share(oracle: Oracle, leaf: Array) -> Array:
    """1 / m, for each client its own."""
    sizes = jnp.asarray(1 if oracle.sizes is None else oracle.sizes)
    return beside(1 / sizes, leaf)
