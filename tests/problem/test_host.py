"""Data of clients that stays on the host: the same run as with the data on the device."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.problem._host import Store

CLIENTS, EXAMPLES, SIZE = 12, 6, 3
KEY = jax.random.key(0)


def data(seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(CLIENTS, EXAMPLES, SIZE))
    return inputs, inputs.sum(-1) + rng.normal(size=(CLIENTS, EXAMPLES))


def loss(x, y, batch):
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ y - targets) ** 2) + 0.5 * jnp.exp(x[0]) * jnp.sum(y**2)


def outer(x, y, batch):
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ y - targets) ** 2)


def problem(train, val, **options):
    return federated.federate(outer, loss, val, train, **options)


def run(found, steps=12, **options):
    x0, y0 = (federated.replicate(jnp.zeros(n), CLIENTS) for n in (1, SIZE))
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_lr=0.1, lower_steps=4)
    return aipod.solve(found, solver, x0, y0, steps, key=KEY, **options)


@pytest.mark.parametrize("participation", [1.0, 0.25], ids=["everyone", "cohorts"])
def test_the_run_is_that_of_data_on_the_device(participation):
    options = {"batch_size": 2, "participation": participation}
    there, here = (run(problem(data(), data(1), on_host=h, **options)) for h in (False, True))
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)
    np.testing.assert_allclose(here.y, there.y, rtol=1e-12)
    assert here.ledger.lower_samples == there.ledger.lower_samples


def test_cohorts_may_use_all_their_data_and_have_unequal_amounts():
    lists = [
        [tuple(part[m, : 2 + m % 3] for part in data(seed)) for m in range(CLIENTS)]
        for seed in (0, 1)
    ]
    options = {"batch_size": None, "participation": 0.5}
    there, here = (run(problem(*lists, on_host=h, **options)) for h in (False, True))
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)


def test_memory_mapped_files_and_a_resumed_run(tmp_path):
    found = []
    for seed in (0, 1):
        parts = []
        for index, part in enumerate(data(seed)):
            np.save(tmp_path / f"{seed}{index}.npy", part)
            parts.append(np.load(tmp_path / f"{seed}{index}.npy", mmap_mode="r"))
        found.append(tuple(parts))
    mapped = problem(*found, batch_size=2, participation=0.25, on_host=True)
    whole = run(mapped)
    run(mapped, 5, checkpoint=tmp_path / "state")
    again = problem(*found, batch_size=2, participation=0.25, on_host=True)
    resumed = run(again, 12, checkpoint=tmp_path / "state", resume=True)
    np.testing.assert_array_equal(resumed.x, whole.x)
    other = problem(found[1], found[0], batch_size=2, participation=0.25, on_host=True)
    with pytest.raises(ValueError, match="data"):
        run(other, 14, checkpoint=tmp_path / "state", resume=True)


def test_the_next_cohort_is_read_while_the_last_one_computes():
    found = problem(data(), data(1), batch_size=2, participation=0.25, on_host=True)
    store = found.lower_samples.store
    run(found)
    # All but the first of 12.
    assert store.read_ahead >= 11


def test_reading_ahead_never_gives_the_rows_of_others():
    store = Store(np.arange(20.0).reshape(10, 2))
    for now, later in (([1, 2], [3, 4]), ([3, 4], [5, 6]), ([0, 9], [1, 2]), ([1, 2], [1, 2])):
        time.sleep(0.001)
        np.testing.assert_array_equal(store.fetch(np.array(now), np.array(later)), store.data[now])
    assert store.read_ahead == 2


def test_exact_values_still_work():
    sampler = aipod.HostClientMinibatches(data(), 2)
    assert sampler.expected().data[0].shape == (CLIENTS, EXAMPLES, SIZE)


def test_misuse():
    with pytest.raises(ValueError, match="numeric NumPy arrays"):
        aipod.HostClientMinibatches([[1.0, 2.0]], 1)
    with pytest.raises(ValueError, match="second axis"):
        aipod.HostClientMinibatches((np.zeros((2, 3)), np.zeros((2, 4))), 1)
    with pytest.raises(ValueError, match="do not go together"):
        problem(data(), data(1), batch_size=2, on_host=True, epochs=True)
    with pytest.raises(ValueError, match="leave mesh= out"):
        aipod.HostClientMinibatches(data(), 2).by_client()
