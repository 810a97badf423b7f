"""One equality over all entries of a point, or one along an axis for each of the others."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod._misc.tree import same_structure
from aipod.sets._inputs import describe_shapes, fits
from aipod.sets._moving import Moving
from aipod.sets._right import RightHandSide
from aipod.sets._rows import AbstractRows, Restore, leaf_blocks
from aipod.sets._threshold import Row, project_on_row, safe_ratio
from aipod.sets._types import tolerance, typed_like, unified


class OneRow(AbstractRows):
    """<w, y> = total(x), over the whole point or along one axis of each leaf.

    **Arguments:**

    - `weights`: w, in the structure of y, for the whole point only; None for ones.
    - `simplex`: whether the bounds are 0 and infinity.
    """

    total: Moving | RightHandSide | None
    weights: PyTree | None = None
    axis: int | None = eqx.field(static=True, default=None)
    simplex: bool = eqx.field(static=True, default=False)

    @property
    def coupled(self) -> bool:
        return self.total is not None and self.total.coupled

    def fixed(self, x: PyTree) -> "OneRow":
        total = None if self.total is None else self.total.fixed(x)
        return OneRow(total, self.weights, self.axis, self.simplex)

    def bare(self) -> "OneRow":
        return OneRow(None, self.weights, self.axis, self.simplex)

    def example(self) -> PyTree | None:
        return None if self.weights is None else optax.tree.zeros_like(self.weights)

    def count(self, point: PyTree) -> tuple[int | None, int | None]:
        if self.axis is None:
            return 1, 1
        blocks = self.blocks(point)[0]
        found = sum(block.size // max(1, block.shape[self.axis]) for block in blocks)
        return found, found

    def blocks(self, tree: PyTree) -> tuple[list[Array], Restore]:
        if self.axis is None:
            if self.weights is not None and not fits(tree, self.weights):
                raise ValueError(
                    f"the weights have shape {describe_shapes(self.weights)}, but the point has "
                    f"shape {describe_shapes(tree)}: one weight is needed for each entry."
                )
            flat, restore = ravel_pytree(unified(tree))
            return [flat], lambda blocks: typed_like(restore(blocks[0]), tree)
        blocks, restore_leaves = leaf_blocks(tree)
        for block in blocks:
            if not -block.ndim <= self.axis < block.ndim:
                raise ValueError(
                    f"axis={self.axis}, but the point has shape {describe_shapes(tree)}: choose an "
                    "axis that every array of the point has, or None for one sum over all entries."
                )
        return blocks, restore_leaves

    def rights(self, like: PyTree, x: PyTree) -> list[Array]:
        value: Any = None if self.total is None else self.total.at(x)
        axis = self.axis
        if axis is None:
            if not same_structure(value, 0.0) or jnp.size(value) != 1:
                raise ValueError(
                    f"total has shape {describe_shapes(value)}, but all entries share one sum: "
                    "give one number, or choose an axis=."
                )
            return [jnp.reshape(value, (1,))]
        leaves = jax.tree.leaves(like)
        shapes = [_without(jnp.shape(leaf), axis) for leaf in leaves]
        if same_structure(value, 0.0) and jnp.shape(value) == ():
            return [jnp.expand_dims(jnp.broadcast_to(value, shape), axis) for shape in shapes]
        found = jax.tree.leaves(value)
        if not same_structure(value, like) or [jnp.shape(v) for v in found] != shapes:
            raise ValueError(
                f"total has shape {describe_shapes(value)}, but a point of shape "
                f"{describe_shapes(like)} has sums of shape {describe_shapes(shapes_of(shapes))} "
                f"along axis {axis}: give one number, or one for each sum."
            )
        return [jnp.expand_dims(v, axis) for v in found]

    def check(self, y: PyTree, x: PyTree, name: str) -> bool:
        total = self.total
        ready = total is not None and total.check(x, name) not in (False, None)
        jax.eval_shape(self.rights, y, x)
        return ready

    def _row(self, lower: Array | float, upper: Array | None, right: Array) -> Row:
        weights = None if self.weights is None else ravel_pytree(self.weights)[0]
        return Row(lower, upper, weights, right, 0 if self.axis is None else self.axis)

    def gap(self, v: Array, right: Array) -> Array:
        return self._row(v, v, right).total(v) - right

    def nearest(self, y: Array, lower: Array, upper: Array, right: Array) -> tuple[Array, Array]:
        dtype = jnp.result_type(y, lower, upper, right)
        lower, upper, right = lower.astype(dtype), upper.astype(dtype), right.astype(dtype)
        # The projection on a simplex reads no bounds at all.
        row = self._row(0.0, None, right) if self.simplex else self._row(lower, upper, right)
        return project_on_row(row, y.astype(dtype))

    def factor(self, free: Array) -> Array:
        right = jnp.zeros((1,) * free.ndim, jnp.result_type(float))
        return self._row(free, free, right).squares(free)

    def meet(self, v: Array, right: Any, free: Array, factor: Array) -> Array:
        row = self._row(v, v, jnp.zeros((1,) * v.ndim, v.dtype) if right is None else right)
        shift = safe_ratio(row.total(v) - row.right, factor)
        return v - jnp.where(free, shift if row.weights is None else shift * row.weights, 0.0)

    def emptiness(self, lower: Array, upper: Array, right: Array) -> Array:
        least, most = self._reach(lower, upper)
        miss = jnp.maximum(jnp.maximum(least - right, right - most), 0.0)
        nearest = jnp.where(least > right, least, most)
        scale = jnp.where(miss > 0, jnp.maximum(jnp.abs(right), jnp.abs(nearest)), 1.0)
        return jnp.max(miss / scale, initial=0.0)

    def require(self, lower: Any, upper: Any, right: Any, name: str) -> None:
        with jax.ensure_compile_time_eval():
            least, most = (np.asarray(v) for v in self._reach(lower, upper))
            miss = float(self.emptiness(lower, upper, right))
        if miss > tolerance((lower, upper, right)):
            low, high, total = (
                np.broadcast_to(v, least.shape).ravel() for v in (least, most, right)
            )
            worst = np.argmax(np.maximum(low - total, total - high))
            raise ValueError(
                f"{name} is empty: the total is {total[worst]:.6g}, but within the bounds the sum "
                f"lies between {low[worst]:.6g} and {high[worst]:.6g}. Change the total or the "
                "bounds."
            )

    def _reach(self, lower: Array, upper: Array) -> tuple[Array, Array]:
        """The least and the largest sum within the bounds."""
        row = self._row(lower, upper, jnp.zeros(()))
        if row.weights is None:
            return row.total(lower), row.total(upper)
        # An infinite bound times a weight of 0 would be NaN.
        used = row.weights != 0
        low, high = jnp.where(used, lower, 0.0), jnp.where(used, upper, 0.0)
        upwards = row.weights > 0
        return row.total(jnp.where(upwards, low, high)), row.total(jnp.where(upwards, high, low))


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis = axis % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def shapes_of(shapes: list[tuple[int, ...]]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, float) for shape in shapes]
