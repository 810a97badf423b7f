"""Random orders without a sort: one place at a time, and without memory.

A sort of thousands of numbers takes a GPU as long as thirty other operations of a small step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from aipod._misc.keys import hash32

# Rounds of `shuffled`. After a rotation every place is equally likely; each round then halves what
# is left of the order.
_ROUNDS = 16
GOLDEN = 0x9E3779B9
SECOND = 0x85EBCA6B


def shuffled(place: ArrayLike, size: ArrayLike, word: ArrayLike) -> Array:
    """Where `place` goes in a pseudo-random permutation of range(size) that the word chooses.

    Exactly a permutation for every size: the "swap or not" shuffle (Hoang, Morris and Rogaway,
    CRYPTO 2012).
    """
    size, word = jnp.asarray(size, jnp.uint32), jnp.asarray(word, jnp.uint32)
    place = (jnp.asarray(place, jnp.uint32) + hash32(word) % size) % size
    for step in range(1, _ROUNDS + 1):
        key = hash32(word + jnp.uint32(step * GOLDEN % 2**32))
        other = (key % size + size - place) % size
        larger = jnp.maximum(place, other)
        swap = hash32(key ^ (larger * jnp.uint32(SECOND))) >> 31
        place = jnp.where(swap == 1, other, place)
    return place.astype(jnp.int32)


def word_of(key: PRNGKeyArray) -> Array:
    """A 32-bit word that stands for a key."""
    words = jax.random.key_data(key)
    return hash32(words[..., 0] ^ hash32(words[..., -1]))


def some_of(key: PRNGKeyArray, size: int, count: int) -> Array:
    """`count` different numbers below `size`, all sets of them about equally likely."""
    return shuffled(jnp.arange(count), jnp.full(count, size), jnp.broadcast_to(word_of(key), count))
