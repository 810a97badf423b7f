"""Random orders and random sets without a sort."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aipod._misc.shuffle import shuffled, some_of


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 100, 1000])
def test_shuffled_is_a_permutation(size):
    places = jnp.arange(size)
    orders = jax.vmap(lambda word: shuffled(places, jnp.full(size, size), jnp.full(size, word)))(
        jnp.arange(20, dtype=jnp.uint32)
    )
    assert (np.sort(np.asarray(orders), axis=1) == np.arange(size)).all()
    if size > 7:
        assert len(np.unique(np.asarray(orders), axis=0)) == 20


def test_shuffled_orders_are_mixed():
    """Every place is equally likely, and so is every pair of places (chi-square)."""
    size, words = 8, jnp.arange(8000, dtype=jnp.uint32)
    orders = np.asarray(
        jax.vmap(lambda w: shuffled(jnp.arange(size), jnp.full(size, size), jnp.full(size, w)))(
            words
        )
    )
    for a in (0, 3, 7):
        counts = np.bincount(orders[:, a], minlength=size)
        assert np.sum((counts - 1000) ** 2 / 1000) < 30  # 7 degrees of freedom
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size**2)
    pairs = pairs[pairs > 0]
    assert len(pairs) == size * (size - 1)
    mean = 8000 / len(pairs)
    assert np.sum((pairs - mean) ** 2 / mean) < 110  # 55 degrees of freedom


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (5, 5), (50, 10), (5000, 250)])
def test_some_of_are_different_numbers_below_the_size(size, count):
    keys = jax.random.split(jax.random.key(0), 30)
    found = np.asarray(jax.vmap(lambda key: some_of(key, size, count))(keys))
    assert found.min() >= 0
    assert found.max() < size
    assert (np.diff(np.sort(found, axis=1), axis=1) > 0).all()
    if 1 < count < size:
        assert len(np.unique(np.sort(found, axis=1), axis=0)) == 30


@pytest.mark.parametrize(("size", "count"), [(5, 2), (6, 3), (10, 3)])
def test_all_sets_are_equally_likely(size, count):
    """Chi-square; the keys are those of one run, step after step."""
    sets = math.comb(size, count)
    keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.key(3), k))(jnp.arange(200 * sets))
    found = np.asarray(jax.vmap(lambda key: some_of(key, size, count))(keys))
    counts = np.unique(np.sum(2**found, axis=1), return_counts=True)[1]
    assert len(counts) == sets
    # Degrees of freedom and five standard deviations.
    assert np.sum((counts - 200) ** 2 / 200) < sets - 1 + 5 * np.sqrt(2 * (sets - 1))
