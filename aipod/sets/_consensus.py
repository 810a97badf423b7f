"""Agreement between clients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from aipod._tree import all_finite
from aipod.sets._base import AbstractSet, require_concrete


def _beside(weights: Array, leaf: Array) -> Array:
    """The weights, shaped to multiply a leaf along its client axis."""
    return weights.reshape((-1,) + (1,) * (leaf.ndim - 1)).astype(leaf.dtype)


class Consensus(AbstractSet):
    """All clients agree: y_1 = ... = y_M along the leading axis of every leaf.

    Projection is the mean over clients, broadcast: a communication round (`A-V2`, `proj_y_fed`).
    With weights the mean is weighted; it is then the orthogonal projection in the inner product
    sum_m w_m <u_m, v_m>, and `riesz` turns an ordinary gradient into a direction there.

    **Arguments:**

    - `weights`: one positive number for each client; only their ratios count.

    !!! example
        ```python
        aipod.Consensus().project(jnp.array([[1.0], [3.0]]))  # [[2.], [2.]]
        ```
    """

    weights: Array | None

    def __init__(self, weights: ArrayLike | None = None) -> None:
        if weights is None:
            self.weights = None
            return
        require_concrete(weights, "Consensus")
        value = jnp.asarray(weights, float)
        if value.ndim != 1 or not bool(jnp.all(value > 0)) or not all_finite(value):
            raise ValueError(
                "weights must be a vector with one positive number for each client; leave a "
                "client out of the federation rather than giving it weight 0."
            )
        self.weights = value / jnp.sum(value)

    def _over_clients(self, combine: Callable[[Array], Array], tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(combine(leaf), leaf.shape), tree)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.tangent(y)

    def tangent(self, v: PyTree) -> PyTree:
        if self.weights is None:
            return self._over_clients(lambda leaf: jnp.mean(leaf, axis=0, keepdims=True), v)
        weights = self.weights
        return self._over_clients(
            lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1)[None], v
        )

    def cotangent(self, gradient: PyTree) -> PyTree:
        if self.weights is None:
            return self.tangent(gradient)
        weights = self.weights
        return jax.tree.map(
            lambda leaf: _beside(weights, leaf) * jnp.sum(leaf, axis=0, keepdims=True), gradient
        )

    def riesz(self, gradient: PyTree) -> PyTree:
        if self.weights is None:
            return gradient
        weights = self.weights
        return jax.tree.map(lambda leaf: leaf / (leaf.shape[0] * _beside(weights, leaf)), gradient)

    @property
    def federated(self) -> bool:
        return True

    def message_size(self, y: PyTree) -> int:
        return sum(leaf[0].nbytes for leaf in jax.tree.leaves(y))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return jnp.zeros(()) if like is None else optax.tree.zeros_like(like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.project(y))

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(y)]
        counts = {shape[0] if shape else None for shape in shapes}
        if self.weights is not None:
            counts.add(self.weights.shape[0])
        if len(counts) > 1 or None in counts:
            weighted = "" if self.weights is None else f" for {self.weights.shape[0]} weights"
            raise ValueError(
                f"{name} is Consensus{weighted}: the leading axis of every leaf must be the client "
                f"axis, of one length, but the shapes are {shapes}."
            )
