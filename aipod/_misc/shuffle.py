"""Random orders without a sort: one place at a time, and without memory.

A GPU sorts thousands of numbers in several passes; this is one operation.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from aipod._misc.keys import ODD, hash32, word_of

# Rounds of `shuffled`. After a rotation every place is equally likely; each round then halves what
# is left of the order.
_ROUNDS = 16


def shuffled(place: ArrayLike, size: ArrayLike, word: ArrayLike) -> Array:
    """Where `place` goes in a pseudo-random permutation of range(size) that the word chooses.

    Exactly a permutation for every size: the "swap or not" shuffle (Hoang, Morris and Rogaway,
    CRYPTO 2012).
    """
    size, word = jnp.asarray(size, jnp.uint32), jnp.asarray(word, jnp.uint32)
    place = (jnp.asarray(place, jnp.uint32) + hash32(word) % size) % size
    for step in range(1, _ROUNDS + 1):
        key = hash32(word + jnp.uint32(step * ODD[0] % 2**32))
        other = (key % size + size - place) % size
        larger = jnp.maximum(place, other)
        swap = hash32(key ^ (larger * jnp.uint32(ODD[1]))) >> 31
        place = jnp.where(swap == 1, other, place)
    return place.astype(jnp.int32)


def some_of(key: PRNGKeyArray, size: int, count: int) -> Array:
    """`count` different numbers below `size`, all sets of them about equally likely."""
    return shuffled(jnp.arange(count), size, word_of(key))
