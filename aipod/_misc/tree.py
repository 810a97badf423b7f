"""Arithmetic on pytrees that Optax lacks; results keep the data types of the first operand."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree


def is_concrete(tree: PyTree) -> bool:
    """Whether every leaf has a value that Python may look at (no JAX tracer among them)."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is a number or an array of numbers or truth values, of JAX or NumPy."""
    kind = getattr(leaf, "dtype", None)
    if kind is None:
        return isinstance(leaf, bool | int | float | complex)
    return bool(jnp.issubdtype(kind, jnp.number) or jnp.issubdtype(kind, jnp.bool_))


def all_finite(tree: PyTree) -> bool:
    """Whether no inexact leaf holds NaN or infinity; tracers and other leaves pass."""
    return all(
        bool(np.all(np.isfinite(np.asarray(leaf))))
        for leaf in jax.tree.leaves(tree)
        if is_concrete(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    )


def same_structure(tree: PyTree, other: PyTree) -> bool:
    """Whether two trees are containers of the same kind; their leaves may differ."""
    first: Any = jax.tree.structure(tree)
    return bool(first == jax.tree.structure(other))


def as_arrays(tree: PyTree) -> PyTree:
    """The leaves as JAX arrays of a strong data type.

    A weak type would change in the first step of a loop, and makes JAX compile a program twice.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def to_device(array: ArrayLike, dtype: Any = float) -> Array:
    """Numbers as a JAX array; converted by NumPy, which compiles nothing."""
    return jax.device_put(np.asarray(array, jax.dtypes.canonicalize_dtype(dtype)))


def rounding(tree: PyTree) -> float:
    """The rounding error of 1 in the coarsest data type of a tree."""
    return max(float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in jax.tree.leaves(tree))


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree in the data types of another; a loop must keep the types of what it carries."""
    return jax.tree.map(lambda leaf, old: jnp.asarray(leaf, jnp.result_type(old)), tree, like)


def axpy(tree: PyTree, scale: Array | float, direction: PyTree) -> PyTree:
    """tree + scale * direction, in the data types of tree.

    `scale` is one number, or one for each entry of the leading axis, which is then that of clients.
    """

    def moved(leaf: Array, step: Array) -> Array:
        return (leaf + in_rows(scale, step) * step).astype(leaf.dtype)

    return jax.tree.map(moved, tree, direction)


def scaled(scale: Array | float, tree: PyTree) -> PyTree:
    """scale * tree, with a scale as in `axpy`."""
    return jax.tree.map(lambda leaf: in_rows(scale, leaf) * leaf, tree)


def in_rows(scale: Array | float, leaf: Array) -> Any:
    """A scale as in `axpy`, in a shape that multiplies a leaf."""
    if not jnp.ndim(scale):
        return scale
    return jnp.reshape(scale, jnp.shape(scale) + (1,) * (jnp.ndim(leaf) - jnp.ndim(scale)))


def inner(tree: PyTree, other: PyTree, *, per_client: bool = False) -> Array:
    """<tree, other>, in single precision at least.

    With `per_client` one number for each entry of the leading axis, which is then never summed
    over: in a program that is spread over devices such a sum would be one more message.
    """

    def product(a: Array, b: Array) -> Array:
        wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
        a, b = jnp.asarray(a, wide), jnp.asarray(b, wide)
        return _by_rows(a, b) if per_client else jnp.vdot(a, b).real

    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    parts = [product(a, b) for a, b in leaves]
    return sum(parts[1:], parts[0]) if parts else jnp.zeros(())


# Up to so many numbers, products are summed one after the other.
_FEW = 1024


def inners(pairs: Sequence[tuple[PyTree, PyTree]], *, per_client: bool = False) -> list[Array]:
    """`inner` of several pairs of trees that are alike; of short ones all sums in one loop.

    XLA makes three programs of every sum on a CPU, and each takes longer than to add up a few
    numbers.
    """
    leaves = [leaf for pair in pairs for tree in pair for leaf in jax.tree.leaves(tree)]
    one = len(leaves) == 2 * len(pairs) and len({jnp.shape(leaf) for leaf in leaves}) == 1
    if per_client or not one or jnp.size(leaves[0]) > _FEW or jnp.iscomplexobj(leaves[0]):
        return [inner(a, b, per_client=per_client) for a, b in pairs]
    wide = jnp.promote_types(jnp.result_type(*leaves), jnp.float32)
    flat = [jnp.ravel(jnp.asarray(leaf, wide)) for leaf in leaves]
    products = tuple(a * b for a, b in zip(flat[::2], flat[1::2], strict=True))

    def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return list(jax.lax.reduce(products, (jnp.zeros((), wide),) * len(products), add, (0,)))


def _by_rows(a: Array, b: Array) -> Array:
    """For each entry of the leading axis the sum of a * b.

    In two stages, the first over columns: XLA adds up a row on a CPU one number after the other.
    """
    rows = a.shape[0]
    lanes = _lanes(a.size // rows if rows else 0)
    both = a.reshape(rows, -1), b.reshape(rows, -1)
    whole = both[0].shape[1] // lanes * lanes
    head = [part[:, :whole].reshape(rows, -1, lanes) for part in both]
    rest = [part[:, whole:] for part in both]
    whole_sum = jnp.sum(jnp.sum(head[0] * head[1], axis=1), axis=1)
    return whole_sum + jnp.sum(rest[0] * rest[1], axis=1) if rest[0].shape[1] else whole_sum


def _lanes(length: int) -> int:
    """The columns of the first stage: all but as many as fit, without a rest where that goes."""
    return next((n for n in range(64, 31, -1) if length % n == 0), 64)
