"""Keys from keys, cheaply. A key is either drawn from or split, never both.

`jax.random.split` hashes with Threefry, which on a CPU takes about a microsecond to run and an
eighth of a second to compile at every place it is called; one outer step has a dozen such places.
So only the key of an outer step comes from there; the keys below it are integer hashes of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

# Odd, so that multiples of them run through all 32-bit words; one for each word of a key.
ODD = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


def hash32(word: Array) -> Array:
    """A bijection of 32-bit words in which every input bit moves about half of the output bits."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x21F0AAAD)
    word = (word ^ (word >> 15)) * jnp.uint32(0xD35A2D97)
    return word ^ (word >> 15)


def word_of(key: PRNGKeyArray) -> Array:
    """A 32-bit word that stands for a key."""
    words = jax.random.key_data(key)
    return hash32(words[..., 0] ^ hash32(words[..., -1]))


def subkey(key: PRNGKeyArray, index: int | Array) -> PRNGKeyArray:
    """The key number `index` below a key; distinct for distinct indices."""
    words = jax.random.key_data(key)
    number = jnp.asarray(index, jnp.uint32) + jnp.uint32(1)
    odd = jnp.asarray(ODD[: words.shape[-1]], jnp.uint32)
    return jax.random.wrap_key_data(hash32(words + number * odd), impl=jax.random.key_impl(key))


def subkeys(key: PRNGKeyArray, count: int) -> PRNGKeyArray:
    """The first `count` keys below a key."""
    return jax.vmap(lambda index: subkey(key, index))(jnp.arange(count, dtype=jnp.uint32))


# Indices from here on are for the clients of rounds; those below, for samples.
_ROUNDS = 2**31


def round_key(key: PRNGKeyArray, index: int | Array) -> PRNGKeyArray:
    """A key that chooses the clients of a round, apart from the samples' keys below `key`."""
    return subkey(key, jnp.asarray(index, jnp.uint32) + jnp.uint32(_ROUNDS))


def round_keys(key: PRNGKeyArray, count: int) -> PRNGKeyArray:
    """The first `count` of them."""
    return jax.vmap(lambda index: round_key(key, index))(jnp.arange(count, dtype=jnp.uint32))


def coins(key: PRNGKeyArray, probability: float | Array, count: int) -> Array:
    """`count` independent coins, each true with the given probability (to 1 in 2^24)."""
    word = jax.random.key_data(subkeys(key, count))[:, 0]
    return (word >> 8).astype(jnp.float32) * 2.0**-24 < probability


def signs(key: PRNGKeyArray, like: Array) -> Array:
    """Random signs, -1 or 1, in the shape and data type of an array."""
    words = jax.random.key_data(key)
    index = jnp.arange(like.size, dtype=jnp.uint32)
    word = hash32(hash32(words[0] + index * jnp.uint32(ODD[0])) ^ words[1])
    return jnp.where(word >> 31, 1, -1).astype(like.dtype).reshape(like.shape)


def is_key(value: object) -> bool:
    """Whether value is a JAX key (or an array of them), which NumPy cannot hold."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def to_numpy(leaf: Any) -> np.ndarray:
    """An array or a key as an array of NumPy."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def as_key(value: Any, name: str = "key") -> PRNGKeyArray:
    """One key of JAX's newer kind, also from `jax.random.PRNGKey`; else `ValueError`."""
    if isinstance(value, jax.Array) and value.dtype == jnp.uint32 and value.shape == (2,):
        value = jax.random.wrap_key_data(value)
    if not is_key(value) or value.shape != ():
        raise ValueError(f"{name} must be one JAX key, as in {name}=jax.random.key(0).")
    return value
