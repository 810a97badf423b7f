"""One linear constraint over all entries."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.tree import to_device
from aipod.sets._inputs import (
    as_number,
    as_reals,
    describe_shapes,
    fits,
    largest,
    require_concrete,
    total_size,
)
from aipod.sets._one_row import OneRow
from aipod.sets._right import RightHandSide
from aipod.sets._set import AbstractSet
from aipod.sets._types import typed_like, widened


class Budget(AbstractSet):
    """{y : <w, y> + h(x) = total}: a weighted sum over all entries is fixed.

    **Arguments:**

    - `total`: the sum.
    - `weights`: w, in the structure of y; None for ones.
    - `coupling`: h, a function of x with one value.

    !!! example
        ```python
        aipod.Budget(1.0).project(jnp.zeros(4))  # [0.25, 0.25, 0.25, 0.25]
        ```
    """

    right: RightHandSide
    weights: PyTree | None

    def __init__(
        self,
        total: ArrayLike,
        weights: PyTree[ArrayLike] | None = None,
        coupling: Callable[[PyTree], Array] | None = None,
    ) -> None:
        require_concrete((total, weights), "Budget")
        target = to_device(as_number(total, "total"))
        self.weights = None if weights is None else _as_weights(weights)
        if coupling is not None and not callable(coupling):
            raise ValueError("coupling must be a function h(x) with one value.")
        self.right = RightHandSide(target, coupling)

    @property
    def coupled(self) -> bool:
        return self.right.coupling is not None

    @property
    def total(self) -> Array:
        """The sum; in a set with x fixed, less h(x)."""
        return self.right.target

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return 1, 1

    def _weights_for(self, point: PyTree, name: str = "this set") -> PyTree:
        """One weight for each entry of a point."""
        if self.weights is None:
            return optax.tree.ones_like(point)
        if not fits(point, self.weights):
            raise ValueError(
                f"{name} is a Budget with weights of shape {describe_shapes(self.weights)}, but "
                f"the point has shape {describe_shapes(point)}: one weight is needed for each "
                "entry, in the structure of the point."
            )
        return self.weights

    def _along(self, weights: PyTree, amount: Array) -> PyTree:
        return optax.tree.scale(amount / optax.tree.vdot(weights, weights), weights)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        point = widened(y)
        weights = self._weights_for(point)
        gap = self.right.at(x) - optax.tree.vdot(weights, point)
        return typed_like(optax.tree.add(point, self._along(weights, gap)), y)

    def tangent(self, v: PyTree) -> PyTree:
        point = widened(v)
        weights = self._weights_for(point)
        along = self._along(weights, optax.tree.vdot(weights, point))
        return typed_like(optax.tree.sub(point, along), v)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None and self.weights is None:
            raise ValueError("a Budget without weights does not know the shape of y: pass like=y.")
        if like is None:
            return self._along(self.weights, self.right.at(x))
        return typed_like(self._along(self._weights_for(widened(like)), self.right.at(x)), like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        point = widened(y)
        return optax.tree.vdot(self._weights_for(point), point) - self.right.at(x)

    def at(self, x: PyTree) -> "Budget":
        return eqx.tree_at(lambda s: s.right, self, self.right.fixed(x)) if self.coupled else self

    def equalities(self) -> OneRow:
        return OneRow(self.right, self.weights)

    def example(self) -> PyTree | None:
        return None if self.weights is None else optax.tree.zeros_like(self.weights)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        if total_size(y) == 0:
            raise ValueError(f"{name} is a Budget, but the point has no entries to share it.")
        self._weights_for(y, name)
        self.right.check(x, name)


def _as_weights(weights: PyTree) -> PyTree:
    value = jax.tree.map(to_device, as_reals(weights, "weights"))
    size = largest(value)
    if size == 0:
        raise ValueError("weights must not all be 0: nothing would be constrained.")
    # A projection divides by the sum of the squares.
    limits, length = jnp.finfo(jnp.result_type(float)), size * total_size(value) ** 0.5
    if not float(limits.tiny) ** 0.5 < length < float(limits.max) ** 0.5:
        raise ValueError(
            f"weights reach {size:.3g}, and the sum of their squares does not fit {limits.dtype}: "
            "multiply weights, total and coupling by one factor, so that the weights are near 1."
        )
    return value
