"""The faces of a set with bounds."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.sets._bounds import Bounds
from aipod.sets._rows import AbstractRows
from aipod.sets._set import AbstractSet


class Face(AbstractSet):
    """{y : A y = b(x), y_i = its bound at x for i active}: an affine set, which may move with x.

    Made by the `face` and `holding` of a set with bounds. Which bounds are active is data, not
    shape: faces of one set are one pytree, and their masks may change in a compiled loop.
    """

    rows: AbstractRows
    bounds: Bounds
    sides: PyTree  # -1 at the lower bound, 1 at the upper one, 0 free
    factors: list  # what the rows need of their free entries, for each block

    def __init__(self, rows: AbstractRows, bounds: Bounds, sides: PyTree) -> None:
        self.rows, self.bounds, self.sides = rows, bounds, sides
        self.factors = [rows.factor(side == 0) for side in rows.blocks(sides)[0]]

    @property
    def active(self) -> PyTree:
        return self.sides

    @property
    def coupled(self) -> bool:
        return self.rows.coupled or self.bounds.coupled

    def _held(self, like: PyTree, x: PyTree) -> list[Array]:
        """The active bounds at x for each block, 0 in the free entries."""
        lower, upper = (self.rows.blocks(bound)[0] for bound in self.bounds.at(like, x))
        sides = self.rows.blocks(self.sides)[0]
        return [
            jnp.where(side < 0, low, jnp.where(side > 0, high, 0.0))
            for side, low, high in zip(sides, lower, upper, strict=True)
        ]

    def _meet(self, vectors: list[Array], rights: list) -> list[Array]:
        sides = self.rows.blocks(self.sides)[0]
        parts = zip(vectors, rights, sides, self.factors, strict=True)
        return [self.rows.meet(v, right, side == 0, factor) for v, right, side, factor in parts]

    def _free(self, v: PyTree) -> list[Array]:
        """The blocks of v, 0 in the active entries."""
        sides, blocks = self.rows.blocks(self.sides)[0], self.rows.blocks(v)[0]
        return [jnp.where(side == 0, b, 0.0) for side, b in zip(sides, blocks, strict=True)]

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        start = [a + b for a, b in zip(self._free(y), self._held(y, x), strict=True)]
        return self.rows.blocks(y)[1](self._meet(start, self.rows.rights(y, x)))

    def pin(self, y: PyTree, x: PyTree = None) -> PyTree:
        blocks, restore = self._free(y), self.rows.blocks(y)[1]
        return restore([a + b for a, b in zip(blocks, self._held(y, x), strict=True)])

    def loose(self, v: PyTree) -> PyTree:
        return self.rows.blocks(v)[1](self._free(v))

    def tangent(self, v: PyTree) -> PyTree:
        inside = self._free(v)
        return self.rows.blocks(v)[1](self._meet(inside, [None] * len(inside)))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        like = self.example() if like is None else like
        blocks = self._meet(self._held(like, x), self.rows.rights(like, x))
        return self.rows.blocks(like)[1](blocks)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        """A y - b, and how far active entries are from their bounds."""
        blocks, restore = self.rows.blocks(y)
        parts = zip(blocks, self._free(y), self._held(y, x), strict=True)
        off = [block - free - held for block, free, held in parts]
        rights = self.rows.rights(y, x)
        gaps = [self.rows.gap(b, right) for b, right in zip(blocks, rights, strict=True)]
        return gaps, restore(off)

    def at(self, x: PyTree) -> "Face":
        if not self.coupled:
            return self
        fixed = (self.rows.fixed(x), self.bounds.fixed(x))
        return eqx.tree_at(lambda face: (face.rows, face.bounds), self, fixed)

    def example(self) -> PyTree:
        return jax.tree.map(lambda side: jnp.zeros(side.shape), self.sides)
