"""Entries that are not negative and have a given sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod.sets._bounds import Bounds, as_bounds
from aipod.sets._box import Bound
from aipod.sets._inputs import require_concrete
from aipod.sets._moving import Moving, as_moving, require_all_finite
from aipod.sets._one_row import OneRow
from aipod.sets._within import AbstractBounded


class Simplex(AbstractBounded):
    """{y : y >= 0, the entries sum to total}.

    By default all entries of y share one sum, also where y is a pytree, as in `Budget`. With `axis`
    there is one simplex along that axis of every array, for each index of its other axes.

    **Arguments:**

    - `total`: the sum; a number, or a function of x. With `axis` also one number for each sum.
    - `axis`: -1 for one simplex in each row of a matrix; None for all entries.

    !!! example
        ```python
        aipod.Simplex().project(jnp.array([0.5, 0.9, -1.0]))  # [0.3, 0.7, 0.]
        aipod.Simplex(axis=-1).project(jnp.ones((2, 4)))  # 0.25 everywhere
        ```
    """

    rows: OneRow
    bounds: Bounds

    def __init__(self, total: Bound = 1.0, *, axis: int | None = None) -> None:
        require_concrete(total, "Simplex")
        self.rows = OneRow(_as_total(total, "Simplex"), None, _as_axis(axis), simplex=True)
        self.bounds = as_bounds(0.0, np.inf, "the Simplex")

    def multiply(self, x: PyTree, exponents: PyTree) -> PyTree:
        blocks, restore = self.rows.blocks(x)
        powers, axis = self.rows.blocks(exponents)[0], self.rows.axis or 0

        def scaled(v: Array, power: Array, right: Array) -> Array:
            # With logarithms, and the largest entry at 1, nothing overflows.
            logs = jnp.where(v > 0, jnp.log(jnp.where(v > 0, v, 1.0)), -jnp.inf) - power
            weights = jnp.exp(logs - jnp.max(logs, axis, keepdims=True))
            return right * weights / jnp.sum(weights, axis, keepdims=True)

        parts = zip(blocks, powers, self.rows.rights(x, None), strict=True)
        return restore([scaled(*part) for part in parts])


class CappedSimplex(AbstractBounded):
    """{y : 0 <= y <= cap, the entries sum to total}.

    The sum is over all entries of y, or along `axis`, as in `Simplex`.

    **Arguments:**

    - `total`: as in `Simplex`.
    - `cap`: the most that an entry may have: one number, the structure of y, or a function of x.
    - `axis`: as in `Simplex`.

    !!! example
        ```python
        aipod.CappedSimplex(1.0, 0.4).project(jnp.array([0.5, 0.9, -1.0]))  # [0.4, 0.4, 0.2]
        ```
    """

    rows: OneRow
    bounds: Bounds

    def __init__(self, total: Bound, cap: Bound, *, axis: int | None = None) -> None:
        require_concrete((total, cap), "CappedSimplex")
        self.rows = OneRow(_as_total(total, "CappedSimplex"), None, _as_axis(axis))
        upper = as_moving(cap, "cap")
        if any(np.any(np.asarray(leaf) < 0) for leaf in jax.tree.leaves(upper.value)):
            raise ValueError("cap must not be negative: an entry lies between 0 and its cap.")
        self.bounds = Bounds(as_moving(0.0, "lower"), upper)
        check_made(self, "the CappedSimplex")


def check_made(made: AbstractBounded, name: str) -> None:
    """Raises `ValueError` when a set is empty, where nothing moves it and its shape is known."""
    like = made.example()
    if like is not None and not made.coupled:
        made.check(like, name=name)


def _as_total(total: Any, owner: str) -> Moving:
    made = require_all_finite(as_moving(total, "total"))
    for leaf in jax.tree.leaves(made.value):
        if np.any(np.asarray(leaf) < 0):
            raise ValueError(
                f"total is {np.min(leaf):.6g}, but the entries of a {owner} are not negative: "
                "choose a total of at least 0."
            )
    return made


def _as_axis(axis: Any) -> int | None:
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int | np.integer)):
        raise ValueError(f"axis must be one integer or None, got {axis!r}.")
    return None if axis is None else int(axis)
