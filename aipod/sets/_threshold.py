"""The projection on one equality with bounds, {p : <w, p> = b, lower <= p <= upper}.

It is p = clip(y - t w, lower, upper) for the one number t with <w, p> = b. That sum falls with t
and is piecewise linear. Newton's method on t needs a handful of passes over y, where a sort of the
breakpoints costs as much as hundreds (on a CPU, at 10,000 entries).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

_MOST_PASSES = 200  # bisection alone ends in fewer, in float64
_LANES = 64


class Row(eqx.Module):
    """<w, p> = b along an axis with its bounds; arrays of one shape, b with that axis of length 1.

    **Arguments:**

    - `upper`: None where it is infinite.
    - `weights`: w; None for ones.
    """

    lower: Array | float
    upper: Array | None
    weights: Array | None
    right: Array
    axis: int = eqx.field(static=True)

    def clipped(self, z: Array) -> Array:
        """The nearest numbers within the bounds."""
        above = jnp.maximum(z, self.lower)
        return above if self.upper is None else jnp.minimum(above, self.upper)

    def free(self, z: Array) -> Array:
        """Which of them are strictly within the bounds."""
        above = z > self.lower
        return above if self.upper is None else above & (z < self.upper)

    @property
    def simplex(self) -> bool:
        """Whether all weights are 1 and no entry has an upper bound. Lower bounds are then 0."""
        return self.weights is None and self.upper is None

    def shifted(self, y: Array, t: Array) -> Array:
        """y - t w."""
        return y - t if self.weights is None else y - t * self.weights

    def total(self, v: Array) -> Array:
        """<w, v>."""
        weighted = v if self.weights is None else v * self.weights
        return added(weighted, self.axis)

    def squares(self, free: Array) -> Array:
        """The sum of w^2 over the free entries."""
        counted = free.astype(self.right.dtype)
        squared = counted if self.weights is None else counted * self.weights**2
        return added(squared, self.axis)


class _Search(eqx.Module):
    t: Array
    low: Array  # t is not below
    high: Array  # t is not above
    width: Array  # high - low, one pass ago and two passes ago
    width_before: Array
    done: Array
    passes: Array


def project_on_row(row: Row, y: Array) -> tuple[Array, Array]:
    """p, and z = y - t w."""
    t, count = _simplex_threshold(row, y) if row.simplex else (threshold(row, y), None)
    z = row.shifted(y, t)
    point = row.clipped(z)
    # The rounding of a large y is still in the sum. The point has its own, smaller scale.
    for _ in range(1 if row.simplex else 2):
        free = row.free(point)
        squares = row.squares(free) if count is None else count
        rest = safe_ratio(row.total(point) - row.right, squares)
        polished = row.clipped(row.shifted(point, rest))
        point = jnp.where(free, polished, point)
    return point, z


def _rounding(row: Row, y: Array) -> float:
    """Sums of n numbers are rounded: a smaller relative gap would never be reached."""
    return float(jnp.finfo(y.dtype).eps) * (8 + y.shape[row.axis] ** 0.5 / 8)


def _simplex_threshold(row: Row, y: Array) -> tuple[Array, Array]:
    """t for a simplex, and how many entries are free about there.

    The sum is convex in t, so Newton's method rises to the solution.
    """
    near = _rounding(row, y) * row.right
    # As if all entries were free; that is not beyond the solution.
    first = jnp.mean(y, row.axis, keepdims=True) - row.right / y.shape[row.axis]

    def one_pass(
        search: tuple[Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array]:
        t, _, _, passes = search
        z = y - t
        gap, count = row.total(row.clipped(z)) - row.right, row.squares(row.free(z))
        return t + safe_ratio(gap, count), count, gap > near, passes + 1

    t, count, _, _ = jax.lax.while_loop(
        lambda search: jnp.any(search[2]) & (search[3] < _MOST_PASSES),
        one_pass,
        (first, jnp.zeros_like(first), jnp.ones_like(first, bool), jnp.array(0)),
    )
    return t, count


def threshold(row: Row, y: Array) -> Array:
    """t, by Newton's method; by bisection where a Newton step leaves the known interval."""
    near = _rounding(row, y)
    left, right = _extremes(row, y)
    first = safe_ratio(row.total(y) - row.right, row.squares(jnp.ones_like(y, bool)))
    first = jnp.clip(first, left, right)

    def one_pass(search: _Search) -> _Search:
        t = search.t
        z = row.shifted(y, t)
        point = row.clipped(z)
        gap, slope = row.total(point) - row.right, row.squares(row.free(z))
        size = jnp.abs(row.right) + row.total(jnp.abs(point) * _signs(row))
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

    upper = jnp.inf if row.upper is None else row.upper
    low, high = ends(jnp.broadcast_to(row.lower, y.shape))
    other_low, other_high = ends(jnp.broadcast_to(upper, y.shape))
    low, high = jnp.minimum(low, other_low), jnp.maximum(high, other_high)
    none, beyond = low > high, jnp.abs(low) + jnp.abs(high)
    # Strictly beyond: entries that have only one bound are free there, and the sum is linear.
    beyond = jnp.where(beyond > 0, beyond, 1.0)
    return jnp.where(none, -jnp.inf, low - beyond), jnp.where(none, jnp.inf, high + beyond)


def added(v: Array, axis: int) -> Array:
    """The sum along an axis, which stays with length 1.

    That of a long vector in two stages, the first over columns: XLA adds up a vector on a CPU one
    number after the other.
    """
    whole = v.size // _LANES * _LANES
    if v.ndim > 1 or whole < _LANES**2:
        return jnp.sum(v, axis=axis, keepdims=True)
    head = jnp.sum(v[:whole].reshape(-1, _LANES), axis=0)
    return jnp.sum(head, keepdims=True) + jnp.sum(v[whole:], keepdims=True)


def safe_ratio(value: Array, size: Array) -> Array:
    """value / size; 0 where the size is 0."""
    return jnp.where(size > 0, value / jnp.where(size > 0, size, 1.0), 0.0)
