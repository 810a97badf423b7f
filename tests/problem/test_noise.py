"""Streams of `Noise`: every entry of every leaf has numbers of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.problem._noise import _normal

KEY = jax.random.key(5)


def gradient(leaves):
    noise = aipod.Noise(1.0)(KEY)
    return jax.grad(lambda x: noise(x, jnp.zeros(1)))([jnp.zeros(3) for _ in range(leaves)])


def test_no_leaf_repeats_another():
    found = np.stack(gradient(600))
    assert len(np.unique(found[:, 0])) == 600
    # Nor is one the other with its entries shifted.
    assert len(np.unique(found)) > 0.999 * found.size


@pytest.mark.parametrize("stream", [0, 3])
def test_no_entry_of_a_large_leaf_repeats_another(stream):
    """Around the place where the 24 bits of an index end."""
    size = 2**24 + 4096
    many = np.asarray(_normal(KEY, stream, (size,)))
    tail = many[2**24 :]
    next_leaf = np.asarray(_normal(KEY, stream + 1, (4096,)))
    for other in (many[:4096], next_leaf):
        assert not np.array_equal(tail, other)
        assert abs(np.corrcoef(tail, other)[0, 1]) < 5 / 64
    assert abs(tail.mean()) < 5 / 64
    assert abs(tail.std() - 1) < 5 / 64


def test_streams_beyond_the_first_256_are_independent_of_them():
    for high in (256, 512, 256 * 256):
        one, two = (np.asarray(_normal(KEY, stream, (4096,))) for stream in (0, high))
        assert abs(np.corrcoef(one, two)[0, 1]) < 5 / 64
        # No shift of one is the other.
        assert len(np.intersect1d(one, two)) < 10
