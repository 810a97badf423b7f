"""Batches from an iterator of the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod

KEY = jax.random.key(0)


def loader(batches=8, size=16, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(batches, size, 3))
    targets = inputs @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=(batches, size))
    return list(zip(inputs, targets, strict=True))


def lower(x, y, batch):
    return jnp.mean((batch[0] @ y - batch[1]) ** 2) + jnp.exp(x) * jnp.sum(y**2)


def upper(x, y, batch):
    return jnp.mean((batch[0] @ y - batch[1]) ** 2)


def test_every_draw_gets_the_next_batch_and_the_same_draw_the_same():
    batches = [np.full((2, 1), float(i)) for i in range(3)]
    samples = aipod.Stream(batches)
    keys = jax.random.split(KEY, 7)
    found = [float(samples(key)[0, 0]) for key in keys]
    assert found == [0, 1, 2, 0, 1, 2, 0]
    assert float(samples(keys[4])[0, 0]) == 1
    assert samples.size == 2


def test_inside_a_compiled_loop():
    samples = aipod.Stream([np.array([1.0]), np.array([2.0])])
    total = jax.jit(
        lambda keys: jax.lax.scan(lambda s, k: (s + samples(k)[0], None), 0.0, keys)[0]
    )(jax.random.split(KEY, 10))
    assert float(total) == 15


def test_a_solver_learns_from_a_stream():
    train, val = loader(), loader(seed=1)
    stream = aipod.Bilevel(
        upper, lower, upper_samples=aipod.Stream(val), lower_samples=aipod.Stream(train)
    )
    whole = [tuple(np.concatenate(p) for p in zip(*d, strict=True)) for d in (val, train)]
    full = aipod.Bilevel(
        upper,
        lower,
        upper_samples=aipod.FullBatch(whole[0]),
        lower_samples=aipod.FullBatch(whole[1]),
    )
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.05)
    one, other = (
        aipod.solve(p, solver, jnp.zeros(()), jnp.zeros(3), 300, key=KEY) for p in (stream, full)
    )
    np.testing.assert_allclose(one.y, other.y, atol=0.05)
    assert one.ledger.lower_samples > 0


def test_an_incomplete_last_batch_is_left_out():
    samples = aipod.Stream([np.zeros((4, 2)), np.ones((3, 2))])
    assert {float(samples(k)[0, 0]) for k in jax.random.split(KEY, 5)} == {0.0}


def test_a_function_may_make_a_new_pass_each_time():
    passes = []

    def one_pass():
        passes.append(len(passes))
        yield np.full((1, 1), float(len(passes)))

    samples = aipod.Stream(one_pass)
    found = [float(samples(k)[0, 0]) for k in jax.random.split(KEY, 4)]
    # The first pass showed the shapes.
    assert found == [2, 3, 4, 5]


def test_misuse():
    with pytest.raises(ValueError, match="more than once"):
        aipod.Stream(iter([np.zeros((2, 2))]))
    with pytest.raises(ValueError, match="come to an end"):
        aipod.Stream([])
    with pytest.raises(ValueError, match="numeric arrays"):
        aipod.Stream([["a", "b"]])
    mixed = aipod.Stream([np.zeros((2, 2)), (np.zeros((2, 2)),)])
    mixed(KEY)
    with pytest.raises(Exception, match="batches of one kind"):
        jax.block_until_ready(mixed(jax.random.key(1)))
