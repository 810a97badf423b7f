"""Arithmetic on pytrees."""

import jax.numpy as jnp
import numpy as np
import pytest

from aipod._misc.tree import inner, inners


def _leaf(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "per_client"),
    [
        ((7,), float, False),
        ((), float, False),
        ((4, 3), jnp.bfloat16, False),
        ((0,), float, False),
        ((3,), complex, False),
        ((2000,), float, False),
        ((4, 5), float, True),
    ],
    ids=str,
)
def test_several_inner_products_at_once(shape, dtype, per_client):
    rng = np.random.default_rng(0)
    a, b, c = (_leaf(rng, shape, dtype) for _ in range(3))
    if dtype is complex:
        b = b * 1j
    pairs = [(a, a), (a, b), (b, c)]
    together = inners(pairs, per_client=per_client)
    for found, pair in zip(together, pairs, strict=True):
        wanted = inner(*pair, per_client=per_client)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


def test_several_inner_products_of_trees():
    a = {"p": jnp.arange(3.0), "q": jnp.ones((2, 2))}
    b = {"p": jnp.ones(3), "q": 2 * jnp.ones((2, 2))}
    assert [float(found) for found in inners([(a, b), (b, b)])] == [11.0, 19.0]
