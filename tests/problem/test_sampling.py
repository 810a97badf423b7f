"""Where batches come from: their distribution, and that one key means one batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.problem import batch_size, draw, expected

DATA = {"index": jnp.arange(10), "value": 10.0 * jnp.arange(10.0)[:, None]}


def many(sampler, key, count=4000):
    return jax.jit(jax.vmap(sampler))(jax.random.split(key, count))


@pytest.mark.parametrize("replace", [True, False])
def test_minibatches_draw_every_example_equally_often(key, replace):
    batches = many(aipod.Minibatches(DATA, 4, replace=replace), key)
    counts = np.bincount(np.asarray(batches["index"]).ravel(), minlength=10)
    # Pearson's statistic has 9 degrees of freedom: above 40 once in 100,000 seeds.
    mean = counts.mean()
    assert np.sum((counts - mean) ** 2 / mean) < 40
    # The leaves of a batch belong together.
    np.testing.assert_array_equal(batches["value"][..., 0], 10 * batches["index"])
    assert batches["value"].shape == (4000, 4, 1)


def test_without_replacement_no_batch_holds_an_example_twice(key):
    batches = many(aipod.Minibatches(DATA, 4, replace=False), key)
    ordered = np.sort(batches["index"], axis=1)
    assert np.all(np.diff(ordered, axis=1) > 0)


def test_with_replacement_examples_repeat_as_independent_draws_do(key):
    batches = many(aipod.Minibatches(DATA, 4), key)
    ordered = np.sort(batches["index"], axis=1)
    all_different = np.mean(np.all(np.diff(ordered, axis=1) > 0, axis=1))
    probability = 0.9 * 0.8 * 0.7
    error = np.sqrt(probability * (1 - probability) / len(ordered))
    assert abs(all_different - probability) < 4 * error


@pytest.mark.parametrize("replace", [True, False])
def test_minibatch_means_are_unbiased(key, replace):
    values = many(aipod.Minibatches(DATA, 4, replace=replace), key)["value"]
    means = np.mean(np.asarray(values), axis=(1, 2))
    error = np.std(means) / np.sqrt(len(means))
    assert abs(means.mean() - np.mean(DATA["value"])) < 4 * error


@pytest.mark.parametrize("replace", [True, False])
def test_one_key_is_one_batch(key, replace):
    sampler = aipod.Minibatches(DATA, 4, replace=replace)
    once, again = sampler(key)["index"], eqx.filter_jit(sampler)(key)["index"]
    np.testing.assert_array_equal(once, again)
    others = [sampler(other)["index"] for other in jax.random.split(key, 5)]
    assert any(not np.array_equal(once, other) for other in others)


def test_batches_may_be_larger_than_the_data_with_replacement(key):
    assert aipod.Minibatches(DATA, 25)(key)["index"].shape == (25,)


def test_a_batch_of_all_examples_without_replacement_is_a_permutation(key):
    batch = aipod.Minibatches(DATA, 10, replace=False)(key)
    np.testing.assert_array_equal(np.sort(batch["index"]), DATA["index"])


def test_full_batch_is_always_everything(key):
    sampler = aipod.FullBatch(DATA)
    for batch in (sampler(key), sampler(jax.random.key(1)), sampler.expected()):
        assert all(np.array_equal(batch[name], DATA[name]) for name in DATA)


def test_map_changes_the_examples_and_not_the_draw(key):
    sampler = aipod.Minibatches(DATA, 4)
    mapped = sampler.map(lambda data: data["value"] + 1)
    np.testing.assert_array_equal(mapped(key), sampler(key)["value"] + 1)
    full = aipod.FullBatch(DATA).map(lambda data: data["index"] * 2)
    np.testing.assert_array_equal(full(key), 2 * DATA["index"])


def test_samplers_know_their_expectation_and_size(key):
    assert batch_size(aipod.Minibatches(DATA, 4)) == 4
    assert batch_size(aipod.FullBatch(DATA)) == 10
    assert batch_size(aipod.Noise(0.1, aipod.Minibatches(DATA, 4))) == 4
    assert batch_size(None) == batch_size(aipod.Noise(0.1)) == 1
    assert expected(None) is None
    assert draw(None, key) is None
    np.testing.assert_array_equal(expected(aipod.Minibatches(DATA, 4))["index"], DATA["index"])


# -- Noise -----------------------------------------------------------------------------------------

X = {"a": jnp.ones((2, 2)), "b": jnp.ones(3)}
Y = jnp.ones(4)


def noisy(x, y, noise):
    return jnp.sum(x["a"] ** 2) + jnp.sum(y**4) + noise(x, y)


def test_noise_has_mean_zero_and_its_standard_deviation_in_every_entry(key):
    gradient = jax.grad(noisy, argnums=(0, 1))
    clean = gradient(X, Y, aipod.Noise(0.3).expected())
    sampler = aipod.Noise(0.3)
    draws = jax.jit(jax.vmap(lambda k: gradient(X, Y, sampler(k))))(jax.random.split(key, 10_000))
    flat, _ = jax.tree.flatten(jax.tree.map(lambda a, b: a - b[None], draws, clean))
    entries = np.concatenate([np.asarray(leaf).reshape(10_000, -1) for leaf in flat], axis=1)
    assert entries.shape[1] == 11
    assert np.all(np.abs(entries.mean(axis=0)) < 4 * 0.3 / 100)
    np.testing.assert_allclose(entries.std(axis=0), 0.3, rtol=4 / np.sqrt(2 * 10_000))
    # No two entries share their noise.
    correlation = np.corrcoef(entries.T) - np.eye(11)
    assert np.max(np.abs(correlation)) < 5 / 100


def test_noise_is_linear_so_the_hessian_is_clean(key):
    noise = aipod.Noise(2.0)(key)
    hessian = jax.jit(jax.hessian(noisy, argnums=1))(X, Y, noise)
    np.testing.assert_allclose(hessian, 12 * np.eye(4), atol=1e-12)
    # Linear, not affine: nothing is added at the origin.
    zeros = jax.tree.map(jnp.zeros_like, (X, Y))
    assert noise(*zeros) == 0


def test_one_batch_of_noise_is_the_same_everywhere(key):
    noise = aipod.Noise(0.3)(key)
    gradient = jax.grad(noise, argnums=1)
    np.testing.assert_array_equal(gradient(X, Y), gradient(X, 5 * Y))
    other = aipod.Noise(0.3)(jax.random.key(1))
    assert not np.allclose(gradient(X, Y), jax.grad(other, argnums=1)(X, Y))


def test_expected_noise_is_none_and_no_noise_is_exact(key):
    for noise in (aipod.Noise(0.3).expected(), aipod.Noise(0.0)(key)):
        assert noise(X, Y) == 0
        np.testing.assert_array_equal(jax.grad(noise, argnums=1)(X, Y), jnp.zeros(4))


def test_noise_carries_the_batches_of_another_sampler(key):
    sampler = aipod.Noise(0.3, aipod.Minibatches(DATA, 4))
    assert sampler(key).batch["index"].shape == (4,)
    np.testing.assert_array_equal(sampler.expected().batch["index"], DATA["index"])
    assert not np.array_equal(
        sampler(key).batch["index"], sampler(jax.random.key(1)).batch["index"]
    )


# -- Composite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "samples",
    [aipod.FullBatch(DATA), aipod.Minibatches(DATA, 4), aipod.Minibatches(DATA, 4, replace=False)],
    ids=["full", "with", "without"],
)
@pytest.mark.parametrize("draws", [1, 100])
def test_composite_in_a_loop_is_the_plain_objective_on_the_same_key(key, samples, draws):
    composite = aipod.Composite(
        lambda x, batch: jnp.tanh(batch["value"] * x / 50),
        lambda features, y, batch: jnp.mean((features @ y - batch["index"]) ** 2),
    )
    problem = aipod.Bilevel(lambda x, y, _: 0.0, composite, lower_samples=samples)
    x, y = jnp.array(0.7), jnp.array([1.5])
    objective, source = problem.lower_at(x, draws=draws)
    np.testing.assert_allclose(objective(y, source(key)), composite(x, y, samples(key)), rtol=1e-14)


def test_composite_computes_the_features_of_all_data_once_where_that_is_less_work(key):
    rows = []

    def features(x, batch):
        rows.append(len(batch["value"]))
        return x * batch["value"]

    composite = aipod.Composite(features, lambda hidden, y, batch: jnp.mean(hidden @ y))
    problem = aipod.Bilevel(
        lambda x, y, _: 0.0, composite, lower_samples=aipod.Minibatches(DATA, 4)
    )

    def run(draws):
        rows.clear()
        objective, source = problem.lower_at(jnp.array(1.0), draws=draws)
        for loop_key in jax.random.split(key, draws):
            objective(jnp.ones(1), source(loop_key))
        return sum(rows)

    # Ten examples: two batches of four are less work, three are more.
    assert run(2) == 8
    assert run(3) == 10


def test_subkeys_are_distinct_and_their_draws_are_independent():
    from aipod._misc.keys import subkey, subkeys

    parents = jax.random.split(jax.random.key(8), 300)
    children = jax.vmap(lambda key: jax.random.key_data(subkeys(key, 40)))(parents)
    assert len({tuple(words) for words in np.asarray(children).reshape(-1, 2)}) == 300 * 40
    again = jax.random.key_data(subkey(parents[3], 7))
    np.testing.assert_array_equal(again, children[3, 7])
    # Neighbouring subkeys as Threefry keys and as noise: no correlation beyond 5 standard errors.
    keys = jax.vmap(lambda key: subkeys(key, 4))(jax.random.split(jax.random.key(9), 20_000))
    noise = aipod.Noise(1.0)
    for numbers in (
        jax.vmap(jax.vmap(jax.random.normal))(keys),
        jax.vmap(jax.vmap(lambda key: jax.grad(noise(key))(0.0, 0.0)))(keys),
    ):
        correlation = np.corrcoef(np.asarray(numbers).T) - np.eye(4)
        assert np.max(np.abs(correlation)) < 5 / np.sqrt(20_000)
        assert abs(np.mean(numbers)) < 5 / np.sqrt(80_000)


def test_coins_are_fair_and_independent_of_each_other_and_of_the_samples():
    """As ProxSkip tosses them: of one outer step, of the next, and beside the noise of a step."""
    from aipod._misc.keys import coins
    from aipod.slots._proxskip import step_keys

    count, p = 20_000, 0.3

    def step(key):
        coin_key, draw_keys = step_keys(key, 4)
        noise = jax.vmap(lambda draw: jax.grad(aipod.Noise(1.0)(draw))(0.0, 0.0))(draw_keys)
        return jnp.concatenate([coins(coin_key, p, 4).astype(float), noise])

    outer = jax.vmap(lambda k: jax.random.fold_in(jax.random.key(10), k))(jnp.arange(count))
    drawn = np.asarray(jax.jit(jax.vmap(step))(outer))
    error = np.sqrt(p * (1 - p) / count)
    assert np.max(np.abs(drawn[:, :4].mean(axis=0) - p)) < 5 * error
    columns = np.concatenate([drawn[1:], drawn[:-1, :4]], axis=1)
    correlation = np.corrcoef(columns.T) - np.eye(12)
    assert np.max(np.abs(correlation)) < 5 / np.sqrt(count)
    assert np.all(coins(jax.random.key(1), 1.0, 1000))
