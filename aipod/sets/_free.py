"""The whole space."""

import optax
from jaxtyping import PyTree

from aipod.sets._geometry import zero_anchor
from aipod.sets._rows import NoRows
from aipod.sets._set import AbstractSet


class Free(AbstractSet):
    """The whole space: no constraint.

    !!! example
        ```python
        aipod.Free().project(y) is y
        ```
    """

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return y

    def tangent(self, v: PyTree) -> PyTree:
        return v

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return zero_anchor(like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.zeros_like(y)

    def multiply(self, x: PyTree, exponents: PyTree) -> PyTree:
        # The plain step, for parts of a product that need no scale.
        return optax.tree.sub(x, exponents)

    @property
    def constrained(self) -> bool:
        return False

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return 0, 0

    def equalities(self) -> NoRows:
        return NoRows()
