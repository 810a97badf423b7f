"""Finite sums in fixed minibatches, and the order in which epochs visit them.

Data of n examples in batches of b are ceil(n / b) pieces. The objective over all data is the mean
of the pieces' objectives, each weighted by how many examples it has; so a table with one row for
each piece, or a visit of each piece once, sees every example with the same weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.keys import ODD, hash32
from aipod._misc.shuffle import shuffled


def in_epochs(word: Array, count: Array, size: ArrayLike) -> Array:
    """The piece that draw number `count` visits: each of them once in every `size` draws."""
    size = jnp.asarray(size, jnp.int32)
    epoch = (count // size).astype(jnp.uint32)
    own = hash32(word + (epoch + 1) * jnp.uint32(ODD[1]))
    place = shuffled(count % size, size, own)
    # A remainder that changes nothing: XLA takes it for slow, and so does not find the piece again
    # wherever it is used, in the slice of every array of the data.
    return jax.lax.rem(place, jnp.broadcast_to(jnp.where(count >= 0, size, 1), place.shape))


def client_words(word: Array, clients: Array) -> Array:
    """A word for each client, which does not depend on who else is there."""
    return hash32(word + (clients.astype(jnp.uint32) + 1) * jnp.uint32(ODD[0]))


def any_piece(word: Array, size: ArrayLike) -> Array:
    """One of `size` pieces, all equally likely."""
    return (hash32(word) % jnp.asarray(size, jnp.uint32)).astype(jnp.int32)


def mixed(data: PyTree) -> PyTree:
    """The examples in another order, always the same one, so that pieces are alike."""
    length = jax.tree.leaves(data)[0].shape[0]
    order = np.random.default_rng(0).permutation(length)
    return jax.tree.map(lambda leaf: leaf[order], data)


def on_piece(data: PyTree, size: int, number: Array, function: Callable[[Any], PyTree]) -> PyTree:
    """function of piece `number`, weighted so that its mean over all pieces is that of the data.

    The last piece may be smaller. Its function is then another program, chosen by a condition.
    """
    length = jax.tree.leaves(data)[0].shape[0]
    size = min(size, length)
    pieces = -(-length // size)
    rest = length - (pieces - 1) * size

    def cut(start: Array | int, count: int) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, count), data)

    if pieces == 1:
        return function(data)
    if rest == size:
        return function(cut(number * size, size))

    def weighted(batch: PyTree, count: int) -> PyTree:
        share = count * pieces / length
        return jax.tree.map(lambda leaf: (share * leaf).astype(leaf.dtype), function(batch))

    return jax.lax.cond(
        number < pieces - 1,
        lambda: weighted(cut(number * size, size), size),
        lambda: weighted(cut((pieces - 1) * size, rest), rest),
    )


def pieces_of(samples: Any) -> int | None:
    """How many pieces the data of a sampler has; None where it is not known as a finite sum."""
    if samples is None:
        return 1
    found = getattr(samples, "pieces", None)
    return None if found is None else int(found)


def sizes_of(samples: Any) -> Array | int | None:
    """The same, for each client where there are clients."""
    return getattr(samples, "sizes", pieces_of(samples))


def in_order(samples: Any) -> bool:
    """Whether a sampler visits its pieces in epochs."""
    return bool(getattr(samples, "epochs", False))


def clients_of(samples: Any) -> bool:
    """Whether a sampler draws a batch for each client."""
    return hasattr(samples, "clients")
