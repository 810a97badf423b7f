"""Power iterations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree


def power_iteration(
    matvec: Callable[[PyTree], PyTree],
    start: PyTree,
    iterations: int | Array,
    *,
    per_client: bool = False,
) -> tuple[Array, PyTree]:
    """The largest eigenvalue in size, and its vector, of a map symmetric in some inner product.

    With `per_client` the map acts on every entry of the leading axis separately, and each entry has
    its own eigenvalue.
    """

    def body(_: Any, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        _, vector = carry
        image = matvec(vector)
        size = norm(image, per_client=per_client)
        # A flat objective gives a zero image: keep the vector for a later step to start from.
        return size, _scaled(image, size, vector)

    vector = unit(start, per_client=per_client)
    zeros = jnp.zeros_like(norm(vector, per_client=per_client))
    return jax.lax.fori_loop(0, iterations, body, (zeros, vector))


def unit(tree: PyTree, *, per_client: bool = False) -> PyTree:
    """The tree scaled to length 1; as it is where it is 0."""
    return _scaled(tree, norm(tree, per_client=per_client), tree)


def norm(tree: PyTree, *, per_client: bool = False) -> Array:
    """The length; with `per_client` that of each entry of the leading axis."""
    dtype = jnp.result_type(*jax.tree.leaves(tree))
    sizes = jax.vmap(optax.tree.norm)(tree) if per_client else optax.tree.norm(tree)
    return sizes.astype(dtype)


def beside(values: Array, leaf: Array) -> Array:
    """One number for each client, in a shape that broadcasts against a leaf of theirs."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))


def _scaled(tree: PyTree, size: Array, fallback: PyTree) -> PyTree:
    """The tree over its size; the fallback where that is 0."""

    def scaled(leaf: Array, other: Array) -> Array:
        length = beside(size, leaf).astype(leaf.dtype)
        # Leaf by leaf: y may hold several floating-point types.
        tiny = jnp.asarray(jnp.finfo(leaf.dtype).tiny, leaf.dtype)
        return jnp.where(length > 0, leaf / jnp.maximum(length, tiny), other)

    return jax.tree.map(scaled, tree, fallback)
