"""What all sets {y : A y = b(x), lower(x) <= y <= upper(x)} share."""

import functools
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.tree import is_concrete
from aipod.sets._bounds import Bounds
from aipod.sets._convex import AbstractConvex
from aipod.sets._face import Face
from aipod.sets._inputs import total_size
from aipod.sets._moving import known
from aipod.sets._rows import AbstractRows

# By this factor a test for an active bound must be passed, or failed, to change the bound's state.
_BAND = 2.0


class AbstractBounded(AbstractConvex):
    """Equalities and bounds. The projection is piecewise linear; its derivative is the face's."""

    rows: eqx.AbstractVar[AbstractRows]
    bounds: eqx.AbstractVar[Bounds]

    @property
    def coupled(self) -> bool:
        return self.rows.coupled or self.bounds.coupled

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        """The equalities and the finite bounds together; the rank is that of the equalities."""
        rows, rank = self.rows.count(point)
        return None if rows is None else rows + self.bounds.count(point), rank

    def _data(self, like: PyTree, x: PyTree) -> list[tuple[Array, Array, Any]]:
        """The bounds and the right-hand side at x, block by block."""
        lower, upper = (self.rows.blocks(bound)[0] for bound in self.bounds.at(like, x))
        return list(zip(lower, upper, self.rows.rights(like, x), strict=True))

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        blocks, restore = self.rows.blocks(y)
        rows, data = self.rows.bare(), self._data(y, x)
        return restore([_nearest(b, *d, rows=rows)[0] for b, d in zip(blocks, data, strict=True)])

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        """A y - b, and how far entries are beyond their bounds."""
        blocks, restore = self.rows.blocks(y)
        data = self._data(y, x)
        gaps = [self.rows.gap(b, d[2]) for b, d in zip(blocks, data, strict=True)]
        beyond = [b - jnp.clip(b, *d[:2]) for b, d in zip(blocks, data, strict=True)]
        return gaps, restore(beyond)

    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> Face:
        y, correction, x, step = jax.lax.stop_gradient((y, correction, x, step))
        blocks, restore = self.rows.blocks(y)
        pushes, rows = self.rows.blocks(correction)[0], self.rows.bare()
        data = self._data(y, x)
        ends = [
            rows.nearest(b - jnp.asarray(step * push), *d)[1]
            for b, push, d in zip(blocks, pushes, data, strict=True)
        ]
        multipliers = restore([b - end for b, end in zip(blocks, ends, strict=True)])
        return self.holding(self.sides(y, multipliers, x, previous=previous))

    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]:
        blocks, restore = self.rows.blocks(y)
        rows, data = self.rows.bare(), self._data(y, x)
        found = [_nearest(b, *d, rows=rows) for b, d in zip(blocks, data, strict=True)]
        return restore([p for p, _ in found]), restore([p - before for p, before in found])

    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree:
        y, multipliers, x = jax.lax.stop_gradient((y, multipliers, x))
        blocks, restore = self.rows.blocks(y)
        pulls, data = self.rows.blocks(multipliers)[0], self._data(y, x)
        old = [None] * len(blocks) if previous is None else self.rows.blocks(previous)[0]
        parts = zip(blocks, pulls, data, old, strict=True)
        found = restore([_sides(b, pull, d[0], d[1], o) for b, pull, d, o in parts])
        return jax.tree.map(lambda side: side.astype(jnp.int8), found)

    def holding(self, active: PyTree) -> Face:
        return Face(self.rows, self.bounds, jax.tree.map(lambda s: s.astype(jnp.int8), active))

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        like = self.example() if like is None else like
        if like is None:
            raise ValueError(
                f"a {type(self).__name__} made of numbers does not know the shape of y: pass "
                "like=y."
            )
        found = [self.rows.emptiness(*data) for data in self._data(like, x)]
        return functools.reduce(jnp.maximum, found, self.bounds.excess(like, x))

    def at(self, x: PyTree) -> Self:
        if not self.coupled:
            return self
        fixed = (self.rows.fixed(x), self.bounds.fixed(x))
        return eqx.tree_at(lambda s: (s.rows, s.bounds), self, fixed)

    def example(self) -> PyTree | None:
        return self.bounds.example(self.rows.example())

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        if total_size(y) == 0:
            raise ValueError(f"{name} is a {type(self).__name__}, but the point has no entries.")
        self.rows.blocks(y)
        ready = self.bounds.check(y, x, name) and self.rows.check(y, x, name)
        if ready and is_concrete(self):
            for lower, upper, right in known(self._data, y, x):
                self.rows.require(lower, upper, right, name)


def _sides(y: Array, pull: Array, lower: Array, upper: Array, previous: Array | None) -> Array:
    """-1, 0 or 1 for each entry of a block; `pull` are the multipliers of its bounds."""
    enter = 1.0 if previous is None else 1 / _BAND
    low, high = (
        (1.0, 1.0)
        if previous is None
        else (
            jnp.where(previous < 0, _BAND, enter),
            jnp.where(previous > 0, _BAND, enter),
        )
    )
    # Rounding alone must not free an entry that lies on its bound.
    slack = 16 * float(jnp.finfo(y.dtype).eps) * jnp.maximum(_largest(y), _largest(y - pull))
    at_lower = (y - lower <= low * pull + slack) | (lower >= upper)
    at_upper = upper - y <= -high * pull + slack
    return jnp.where(at_lower, -1.0, jnp.where(at_upper, 1.0, 0.0))


def _largest(v: Array) -> Array:
    return jnp.max(jnp.abs(v), initial=0.0)


@eqx.filter_custom_jvp
def _nearest(
    y: Array, lower: Array, upper: Array, right: Any, *, rows: AbstractRows
) -> tuple[Array, Array]:
    return rows.nearest(y, lower, upper, right)


@_nearest.def_jvp
def _nearest_jvp(primals: tuple, tangents: tuple, *, rows: AbstractRows) -> tuple[Any, Any]:
    """The projection moves along the face that it lands on, and with the bounds of that face."""
    _, lower, upper, _ = primals
    # Through the rule once more, for derivatives of derivatives.
    point, before = _nearest(*primals, rows=rows)
    low, high = before <= lower, before >= upper
    free = ~(low | high)
    moves = [jnp.zeros_like(point) if t is None else t for t in tangents[:3]]
    moved = jnp.where(low, moves[1], jnp.where(high, moves[2], moves[0]))
    slope = rows.meet(moved, tangents[3], free, rows.factor(free)).astype(point.dtype)
    # The multipliers only decide which bounds are active.
    return (point, before), (slope, jnp.zeros_like(before))
