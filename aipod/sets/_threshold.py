"""The projection on one equality with bounds, {p : <w, p> = b, lower <= p <= upper}.

It is p = clip(y - t w, lower, upper) for the one number t with <w, p> = b. That sum falls with t
and is piecewise linear. Newton's method on t needs a handful of passes over y, where a sort of the
breakpoints costs as much as hundreds (on a CPU, at 10,000 entries).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

_MOST_PASSES = 200  # bisection alone ends in fewer, in float64


class Row(NamedTuple):
    """<w, p> = b along an axis with its bounds; arrays of one shape, b with that axis of length 1.

    **Arguments:**

    - `weights`: w; None for ones.
    """

    lower: Array
    upper: Array
    weights: Array | None
    right: Array
    axis: int

    def shifted(self, y: Array, t: Array) -> Array:
        """y - t w."""
        return y - t if self.weights is None else y - t * self.weights

    def total(self, v: Array) -> Array:
        """<w, v>."""
        weighted = v if self.weights is None else v * self.weights
        return jnp.sum(weighted, axis=self.axis, keepdims=True)

    def squares(self, free: Array) -> Array:
        """The sum of w^2 over the free entries."""
        counted = free.astype(self.right.dtype)
        squared = counted if self.weights is None else counted * self.weights**2
        return jnp.sum(squared, axis=self.axis, keepdims=True)


class _Search(NamedTuple):
    t: Array
    low: Array  # t is not below
    high: Array  # t is not above
    width: Array  # high - low, two passes ago and one pass ago
    width_before: Array
    done: Array
    passes: Array


def project_on_row(row: Row, y: Array, *, simplex: bool = False) -> tuple[Array, Array]:
    """p, and z = y - t w.

    **Arguments:**

    - `simplex`: whether w = 1, lower = 0 and upper is infinite; the search then starts nearer.
    """
    t = threshold(row, y, simplex=simplex)
    z = row.shifted(y, t)
    point, free = jnp.clip(z, row.lower, row.upper), (z > row.lower) & (z < row.upper)
    # The rounding of a large y would be left in the sum. The point has its own, smaller scale.
    rest = safe_ratio(row.total(point) - row.right, row.squares(free))
    polished = jnp.clip(row.shifted(point, rest), row.lower, row.upper)
    return jnp.where(free, polished, point), z


def threshold(row: Row, y: Array, *, simplex: bool = False) -> Array:
    """t, by Newton's method; by bisection where a Newton step leaves the known interval."""
    eps = float(jnp.finfo(y.dtype).eps)
    # Sums of n numbers are rounded; a tighter goal would never be met. The caller polishes.
    near = eps * (8 + y.shape[row.axis] ** 0.5 / 8)
    first = safe_ratio(row.total(y) - row.right, row.squares(jnp.ones_like(y, bool)))
    if simplex:
        # No entry exceeds the total. This and `first` are both at most the solution.
        first = jnp.maximum(first, jnp.max(y, row.axis, keepdims=True) - row.right)
        left = right = first
    else:
        left, right = _extremes(row, y)
        first = jnp.clip(first, left, right)

    def one_pass(search: _Search) -> _Search:
        t = search.t
        z = row.shifted(y, t)
        point = jnp.clip(z, row.lower, row.upper)
        total, size = row.total(point), jnp.abs(row.right)
        gap = total - row.right
        slope = row.squares((z > row.lower) & (z < row.upper))
        if not simplex:
            size = size + row.total(jnp.abs(point) * _signs(row))
        low, high = jnp.where(gap >= 0, t, search.low), jnp.where(gap <= 0, t, search.high)
        newton = t + safe_ratio(gap, slope)
        middle = jnp.where(
            jnp.isfinite(low) & jnp.isfinite(high),
            low + (high - low) / 2,
            jnp.where(gap > 0, right, left),
        )
        slow = high - low > search.width_before / 2
        good = (slope > 0) & (newton > low) & (newton < high) & ~slow
        following = jnp.where(good, newton, middle)
        stuck = (following <= low) | (following >= high)
        # Written so that NaN ends the search too.
        done = search.done | ~(jnp.abs(gap) > near * size) | stuck
        return _Search(
            jnp.where(done, t, following),
            low,
            high,
            jnp.where(jnp.isfinite(high - low), high - low, jnp.inf),
            search.width,
            done,
            search.passes + 1,
        )

    infinite = jnp.full_like(first, jnp.inf)
    start = _Search(
        first, -infinite, infinite, infinite, infinite, jnp.zeros_like(first, bool), jnp.array(0)
    )
    return jax.lax.while_loop(
        lambda search: ~jnp.all(search.done) & (search.passes < _MOST_PASSES), one_pass, start
    ).t


def _signs(row: Row) -> Array | float:
    return 1.0 if row.weights is None else jnp.sign(row.weights)


def _extremes(row: Row, y: Array) -> tuple[Array, Array]:
    """Numbers t beyond which no entry reaches a bound; none on the left, none on the right."""
    weights = jnp.ones_like(y) if row.weights is None else row.weights

    def ends(bound: Array) -> tuple[Array, Array]:
        reached = jnp.isfinite(bound) & (weights != 0)
        t = (y - jnp.where(reached, bound, 0.0)) / jnp.where(weights == 0, 1.0, weights)
        smallest = jnp.min(jnp.where(reached, t, jnp.inf), row.axis, keepdims=True, initial=jnp.inf)
        largest = jnp.where(reached, t, -jnp.inf)
        return smallest, jnp.max(largest, row.axis, keepdims=True, initial=-jnp.inf)

    (low, high), (other_low, other_high) = ends(row.lower), ends(row.upper)
    low, high = jnp.minimum(low, other_low), jnp.maximum(high, other_high)
    none, beyond = low > high, jnp.abs(low) + jnp.abs(high)
    # Strictly beyond: entries that have only one bound are free there, and the sum is linear.
    beyond = jnp.where(beyond > 0, beyond, 1.0)
    return jnp.where(none, -jnp.inf, low - beyond), jnp.where(none, jnp.inf, high + beyond)


def safe_ratio(value: Array, size: Array) -> Array:
    """value / size; 0 where the size is 0."""
    return jnp.where(size > 0, value / jnp.where(size > 0, size, 1.0), 0.0)
