"""Several equalities with bounds, {p : R'p = q, lower <= p <= upper}, R with orthonormal columns.

The projection of y is p = clip(y - R m, lower, upper) for multipliers m with R'p = q. They minimise
a convex, piecewise quadratic function (the dual), with gradient q - R'p and generalised Hessian
R'D R, D = 1 in the free entries: a semismooth Newton method with an exact line search on that
function ends after finitely many steps.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from aipod.sets._inputs import describe_shapes
from aipod.sets._linear import DenseMap
from aipod.sets._right import RightHandSide
from aipod.sets._rows import AbstractRows, Restore
from aipod.sets._threshold import Row, threshold
from aipod.sets._types import typed_like, unified

_MOST_STEPS = 1000  # 5 to 20 where y is about as far away as the set is wide
_MOST_POLISHES = 5
# The linear program of `require` is solved to 1e-7.
_EMPTY = 1e-6


class DenseRows(AbstractRows):
    """A y = right(x) for a dense matrix A of any rank, which has been factored.

    **Arguments:**

    - `structure`: what a point looks like; None for any pytree, which is ravelled.
    - `stacked`: the length of a leading axis of points, where the equalities hold for each entry
        of it; None where there is no such axis.
    """

    map: DenseMap
    right: RightHandSide | None
    structure: PyTree[jax.ShapeDtypeStruct] = eqx.field(static=True, default=None)
    stacked: int | None = eqx.field(static=True, default=None)

    @property
    def coupled(self) -> bool:
        return self.right is not None and self.right.coupled

    def fixed(self, x: PyTree) -> "DenseRows":
        right = None if self.right is None else self.right.fixed(x)
        return DenseRows(self.map, right, self.structure, self.stacked)

    def bare(self) -> "DenseRows":
        return DenseRows(self.map, None, self.structure, self.stacked)

    def example(self) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._structure)

    @property
    def _structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.map.in_structure if self.structure is None else self.structure

    def count(self, point: PyTree) -> tuple[int | None, int | None]:
        times = 1 if self.stacked is None else self.stacked
        return times * self.map.matrix.shape[0], times * self.map.rank

    def blocks(self, tree: PyTree) -> tuple[list[Array], Restore]:
        flat, restore = ravel_pytree(unified(tree))
        shape = self.map.in_structure.shape
        shape = shape if self.stacked is None else (self.stacked, *shape)
        wanted, given = (
            [jnp.shape(v) for v in jax.tree.leaves(t)] for t in (self._structure, tree)
        )
        if flat.size != np.prod(shape) or (self.structure is not None and given != wanted):
            raise ValueError(
                f"the point has shape {describe_shapes(tree)}, but the equalities take "
                f"{describe_shapes(self._structure)}: one entry is needed for each column of A."
            )
        return [flat.reshape(shape)], lambda blocks: typed_like(restore(blocks[0].ravel()), tree)

    def rights(self, like: PyTree, x: PyTree) -> list[Any]:
        return [None if self.right is None else self.map.solve(self.right.at(x))]

    def check(self, y: PyTree, x: PyTree, name: str) -> bool:
        return self.right is not None and self.right.check(x, name) is not None

    def gap(self, v: Array, right: Array) -> Array:
        return v @ self.map.row - right

    def nearest(self, y: Array, lower: Array, upper: Array, right: Array) -> tuple[Array, Array]:
        dtype = jnp.result_type(y, lower, upper, right)
        row = self.map.row.astype(dtype)
        return self._each(_project)(row, *(v.astype(dtype) for v in (y, lower, upper, right)))

    def factor(self, free: Array) -> Array:
        return self._each(_inverse)(self.map.row, free)

    def meet(self, v: Array, right: Any, free: Array, factor: Array) -> Array:
        right = jnp.zeros_like(v, shape=(*v.shape[:-1], self.map.rank)) if right is None else right
        return self._each(_meet)(self.map.row, v, right, free, factor)

    def _each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the rows and of vectors, for each of a stack of vectors."""
        if self.stacked is None:
            return function
        return lambda row, *vectors: jax.vmap(lambda *v: function(row, *v))(*vectors)

    def emptiness(self, lower: Array, upper: Array, right: Array) -> Array:
        middle = jnp.clip(jnp.zeros_like(lower), lower, upper)
        point = self.nearest(middle, lower, upper, right)[0]
        miss = jnp.max(jnp.abs(self.gap(point, right)), initial=0.0)
        scale = jnp.maximum(jnp.max(jnp.abs(right), initial=0.0), jnp.max(jnp.abs(point)))
        return jnp.where(scale == 0, 0.0, miss / jnp.where(scale == 0, 1.0, scale))

    def require(self, lower: Any, upper: Any, right: Any, name: str) -> None:
        row, times = np.asarray(self.map.row, np.float64), self.stacked or 1
        low, high, wanted = (np.reshape(v, (times, -1)) for v in (lower, upper, right))
        for number in range(times if self.map.rank else 0):
            miss, unit = _least_miss(row, low[number], high[number], wanted[number])
            if miss > _EMPTY:
                raise ValueError(
                    f"{name} is empty: no y between lower and upper satisfies A y + h(x) = c (the "
                    f"best misses by {miss * unit:.3g}, in an orthonormal basis of the rows). "
                    "Widen the bounds, or change c."
                )


def _least_miss(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, right: np.ndarray
) -> tuple[float, float]:
    """min max_i |R'y - q|_i over the bounds, a linear program, in units of the largest number."""
    sizes = np.abs(np.concatenate([low, high, right]))
    unit = float(np.max(sizes[np.isfinite(sizes)], initial=0.0)) or 1.0
    aside = np.ones((row.shape[1], 1))
    found: Any = scipy.optimize.linprog(
        np.append(np.zeros(row.shape[0]), 1.0),
        A_ub=np.block([[row.T, -aside], [-row.T, -aside]]),
        b_ub=np.concatenate([right, -right]) / unit,
        bounds=[*zip(low / unit, high / unit, strict=True), (0, None)],
    )
    return float(found.fun), unit


def _inverse(row: Float[Array, "d r"], free: Array) -> Float[Array, "r r"]:
    """(R'D R)^+. Its eigenvalues are between 0 and 1, whatever the units of A."""
    values, vectors = jnp.linalg.eigh(_curvature(row, free))
    kept = values > row.shape[0] * float(jnp.finfo(row.dtype).eps)
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)
    return (vectors * inverse[None]) @ vectors.T


def _meet(row: Array, v: Array, right: Array, free: Array, inverse: Array) -> Array:
    return v - jnp.where(free, row @ (inverse @ (v @ row - right)), 0.0)


def _curvature(row: Array, free: Array) -> Array:
    """R'D R."""
    return (row * free[:, None].astype(row.dtype)).T @ row


class _Newton(eqx.Module):
    m: Array
    z: Array  # y - R m
    gap: Array  # R'p - q for p = clip(z)
    size: Array  # the length of the gap
    best: Array  # the smallest so far, and its z
    best_z: Array
    stalled: Array  # for how many steps it has not improved
    done: Array
    steps: Array


def _project(row: Array, y: Array, lower: Array, upper: Array, right: Array) -> tuple[Array, Array]:
    # In float32 the bounds found for a y that is far away may be wrong. From the point found then,
    # at the scale of the set, they are right; else the second pass has nothing to do.
    point, both = jax.lax.scan(
        lambda v, _: _project_once(row, v, lower, upper, right), y, None, length=2
    )
    return point, both[0]


def _project_once(
    row: Array, y: Array, lower: Array, upper: Array, right: Array
) -> tuple[Array, Array]:
    eps = float(jnp.finfo(y.dtype).eps)
    z = _newton(row, y, lower, upper, right)

    def polish(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        point, gap, steps = state
        free = (point > lower) & (point < upper)
        move = row @ _damped_solve(row, free, gap, eps * row.shape[0])
        point = jnp.where(free, jnp.clip(point - move, lower, upper), point)
        return point, point @ row - right, steps + 1

    def unequal(state: tuple[Array, Array, Array]) -> Array:
        point, gap, steps = state
        scale = jnp.linalg.norm(point) + jnp.linalg.norm(right)
        return (jnp.linalg.norm(gap) > 4 * eps * scale) & (steps < _MOST_POLISHES)

    # The rounding of a large y is still in the equalities. The point has its own, smaller scale.
    point = jnp.clip(z, lower, upper)
    start = (point, point @ row - right, jnp.array(0))
    return jax.lax.while_loop(unequal, polish, start)[0], z


def _damped_solve(row: Array, free: Array, v: Array, damping: Array | float) -> Array:
    """(R'D R + damping I)^-1 v."""
    damped = _curvature(row, free) + damping * jnp.eye(row.shape[1], dtype=row.dtype)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(damped), v)


def _newton(row: Array, y: Array, lower: Array, upper: Array, right: Array) -> Array:
    """z = y - R m with R' clip(z) = q."""
    eps = float(jnp.finfo(y.dtype).eps)
    reach = jnp.linalg.norm(y) + jnp.linalg.norm(right)

    def clipped(z: Array) -> Array:
        return jnp.clip(z, lower, upper)

    def measured(m: Array) -> tuple[Array, Array, Array, Array]:
        z = y - row @ m
        gap = clipped(z) @ row - right
        return m, z, gap, jnp.linalg.norm(gap)

    def step(state: _Newton) -> _Newton:
        free = (state.z > lower) & (state.z < upper)
        # Fewer free entries than rows leave the curvature singular. What is added vanishes with the
        # gap, which keeps the fast convergence.
        damping = 1e-3 * jnp.minimum(state.size / reach, 1.0) + eps * row.shape[0]
        direction = _damped_solve(row, free, state.gap, damping)
        # The dual is smallest along the direction where its slope, <R d, p> - <q, d>, is 0. Values
        # of the dual itself would be lost in rounding long before.
        along = Row(lower, upper, row @ direction, (right @ direction)[None], 0)
        slope, length = direction @ state.gap, threshold(along, state.z)
        # Near the end the slope is lost in rounding too; full steps are then right.
        scale = jnp.linalg.norm(clipped(state.z)) + jnp.linalg.norm(right)
        known = slope > 16 * eps * jnp.linalg.norm(along.weights) * scale
        new = measured(state.m + jnp.where(known, jnp.maximum(length, 0.0), 1.0) * direction)
        better = new[3] < state.best
        stalled = jnp.where(new[3] < 0.9 * state.best, 0, state.stalled + 1)
        rounding = eps * (reach + scale)
        # Either small, or small enough and no longer falling. Written so that NaN ends it too.
        going_on = (new[3] > 4 * rounding) & ((stalled < 20) | (new[3] > 30 * rounding))
        return _Newton(
            *new,
            jnp.where(better, new[3], state.best),
            jnp.where(better, new[1], state.best_z),
            stalled,
            ~going_on,
            state.steps + 1,
        )

    first = measured(jnp.zeros_like(right))
    done = ~(first[3] > 4 * eps * (reach + jnp.linalg.norm(clipped(y))))
    start = _Newton(*first, first[3], first[1], jnp.array(0), done, jnp.array(0))
    return jax.lax.while_loop(
        lambda state: ~state.done & (state.steps < _MOST_STEPS), step, start
    ).best_z
