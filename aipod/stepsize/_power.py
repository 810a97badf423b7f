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
    dtype = jnp.result_type(*jax.tree.leaves(start))

    def norm(tree: PyTree) -> Array:
        sizes = jax.vmap(optax.tree.norm)(tree) if per_client else optax.tree.norm(tree)
        return sizes.astype(dtype)

    def unit(tree: PyTree, size: Array, fallback: PyTree) -> PyTree:
        def scaled(leaf: Array, other: Array) -> Array:
            beside = size.reshape(size.shape + (1,) * (leaf.ndim - size.ndim)).astype(leaf.dtype)
            # Leaf by leaf: y may hold several floating-point types.
            tiny = jnp.asarray(jnp.finfo(leaf.dtype).tiny, leaf.dtype)
            return jnp.where(beside > 0, leaf / jnp.maximum(beside, tiny), other)

        return jax.tree.map(scaled, tree, fallback)

    def body(_: Any, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        _, vector = carry
        image = matvec(vector)
        size = norm(image)
        # A flat objective gives a zero image: keep the vector for a later step to start from.
        return size, unit(image, size, vector)

    sizes = norm(start)
    begin = (jnp.zeros_like(sizes), unit(start, sizes, start))
    return jax.lax.fori_loop(0, iterations, body, begin)
