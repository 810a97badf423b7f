"""One linear constraint over all entries."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, PyTree

from aipod.sets._inputs import as_reals, describe_shapes, fits, largest, require_concrete
from aipod.sets._right import RightHandSide
from aipod.sets._set import AbstractSet


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
        if np.ndim(total) or np.asarray(total).dtype.kind not in "fiu":
            raise ValueError(
                f"total must be one number, got {type(total).__name__} of shape {np.shape(total)}."
            )
        target = jnp.asarray(as_reals(total, "total"), float)
        if weights is not None:
            weights = as_reals(weights, "weights")
        self.weights = jax.tree.map(lambda w: jnp.asarray(w, float), weights)
        if weights is not None and largest(self.weights) == 0:
            raise ValueError("weights must not all be 0: nothing would be constrained.")
        if coupling is not None and not callable(coupling):
            raise ValueError("coupling must be a function h(x) with one value.")
        self.right = RightHandSide(target, coupling)

    @property
    def coupled(self) -> bool:
        return self.right.coupling is not None

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return 1, 1

    def _weights_for(self, like: PyTree) -> PyTree:
        return optax.tree.ones_like(like) if self.weights is None else self.weights

    def _along(self, weights: PyTree, amount: Array) -> PyTree:
        return optax.tree.scale(amount / optax.tree.vdot(weights, weights), weights)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        weights = self._weights_for(y)
        gap = self.right.at(x) - optax.tree.vdot(weights, y)
        return optax.tree.add(y, self._along(weights, gap))

    def tangent(self, v: PyTree) -> PyTree:
        weights = self._weights_for(v)
        return optax.tree.sub(v, self._along(weights, optax.tree.vdot(weights, v)))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None and self.weights is None:
            raise ValueError("a Budget without weights does not know the shape of y: pass like=y.")
        return self._along(self._weights_for(like), self.right.at(x))

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.vdot(self._weights_for(y), y) - self.right.at(x)

    def at(self, x: PyTree) -> "Budget":
        return eqx.tree_at(lambda s: s.right, self, self.right.fixed(x)) if self.coupled else self

    def example(self) -> PyTree | None:
        return None if self.weights is None else optax.tree.zeros_like(self.weights)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        if self.weights is not None and not fits(y, self.weights):
            raise ValueError(
                f"{name} is a Budget with weights of shape {describe_shapes(self.weights)}, but "
                f"the point has shape {describe_shapes(y)}: one weight is needed for each entry."
            )
        if self.coupled:
            jax.eval_shape(self.right.at, x)
