"""One linear constraint over all entries."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.tree import same_structure
from aipod.sets._base import (
    MOVES_WITH_X,
    AbstractSet,
    as_reals,
    attach,
    describe_shapes,
    largest,
    require_concrete,
    total_size,
)


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

    total: Array
    weights: PyTree | None
    coupling: Callable[[PyTree], Array] | None

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
        self.total = jnp.asarray(as_reals(total, "total"), float)
        if weights is not None:
            weights = as_reals(weights, "weights")
        self.weights = jax.tree.map(lambda w: jnp.asarray(w, float), weights)
        if weights is not None and largest(self.weights) == 0:
            raise ValueError("weights must not all be 0: nothing would be constrained.")
        if coupling is not None and not callable(coupling):
            raise ValueError("coupling must be a function h(x) with one value.")
        self.coupling = coupling

    @property
    def coupled(self) -> bool:
        return self.coupling is not None

    def _weights_for(self, like: PyTree) -> PyTree:
        return optax.tree.ones_like(like) if self.weights is None else self.weights

    def _gap(self, y: PyTree | None, x: PyTree, weights: PyTree) -> Array:
        spent = 0.0 if y is None else optax.tree.vdot(weights, y)
        return self.total - self._shift(x) - spent

    def _shift(self, x: PyTree) -> Array | float:
        if self.coupling is None:
            return 0.0
        if x is None:
            raise ValueError(MOVES_WITH_X)
        return jnp.reshape(self.coupling(x), ())

    def _along(self, weights: PyTree, amount: Array) -> PyTree:
        return optax.tree.scale(amount / optax.tree.vdot(weights, weights), weights)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        weights = self._weights_for(y)
        return optax.tree.add(y, self._along(weights, self._gap(y, x, weights)))

    def tangent(self, v: PyTree) -> PyTree:
        weights = self._weights_for(v)
        return optax.tree.sub(v, self._along(weights, optax.tree.vdot(weights, v)))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None and self.weights is None:
            raise ValueError("a Budget without weights does not know the shape of y: pass like=y.")
        weights = self._weights_for(like)
        return self._along(weights, self._gap(None, x, weights))

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return -self._gap(y, x, self._weights_for(y))

    def at(self, x: PyTree) -> "Budget":
        if self.coupling is None:
            return self
        fields = (self.total - self._shift(x), None)
        return eqx.tree_at(
            lambda s: (s.total, s.coupling), self, fields, is_leaf=lambda leaf: leaf is None
        )

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        if self.coupling is None:
            return y
        return jax.tree.map(attach, y, self.anchor(x, like=y))

    def example(self) -> PyTree | None:
        return None if self.weights is None else optax.tree.zeros_like(self.weights)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        if self.weights is not None and (
            not same_structure(self.weights, y)
            or describe_shapes(self.weights) != describe_shapes(y)
        ):
            raise ValueError(
                f"{name} is a Budget with weights of shape {describe_shapes(self.weights)}, but "
                f"the point has shape {describe_shapes(y)}: one weight is needed for each entry."
            )
        if self.coupling is not None:
            value = jax.eval_shape(self.coupling, x)
            if total_size(value) != 1:
                raise ValueError(
                    f"{name} is a Budget with a coupling h(x) of shape {describe_shapes(value)}: "
                    "it must return one number."
                )
