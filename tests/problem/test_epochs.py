"""Epochs: every example once, for every size, per client, and whatever happens in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.problem._pieces import in_epochs


def test_epochs_visit_every_piece_once_and_in_new_orders():
    counts = jnp.arange(5 * 12)
    visits = np.asarray(jax.vmap(lambda c: in_epochs(jnp.uint32(3), c, 12))(counts)).reshape(5, 12)
    assert (np.sort(visits, axis=1) == np.arange(12)).all()
    assert len(np.unique(visits, axis=0)) == 5


@pytest.mark.parametrize(("examples", "batch"), [(12, 4), (10, 4), (7, 3), (1, 1), (1, 4), (3, 8)])
def test_the_mean_over_pieces_is_the_mean_over_the_data(examples, batch):
    data = np.random.default_rng(0).normal(size=(examples, 3))
    samples = aipod.Minibatches(data, batch, epochs=True)
    means = [samples.on(jnp.asarray(i), lambda b: b.mean(0)) for i in range(samples.pieces)]
    np.testing.assert_allclose(np.mean(means, axis=0), data.mean(0), rtol=1e-6)
    assert samples.pieces == -(-examples // batch)
    assert samples(jax.random.key(0)).shape[0] == samples.size == min(batch, examples)


@pytest.mark.parametrize("counts", [[5, 5, 5], [1, 5, 3], [4, 2, 5]])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 9])
def test_the_mean_over_pieces_of_each_client(counts, batch):
    rng = np.random.default_rng(1)
    data = [rng.normal(size=(n, 2)) for n in counts]
    padded = np.stack([np.resize(d, (5, 2)) for d in data])
    samples = aipod.ClientMinibatches(padded, batch, counts=counts, epochs=True)

    def mean(part):
        if part.weights is None:
            return part.data.mean(1)
        return jnp.sum(part.weights[..., None] * part.data, axis=1)

    seen = np.zeros((3, 2))
    sizes = np.asarray(samples.sizes)
    assert sizes.tolist() == [-(-n // batch) for n in counts]
    for c in range(int(np.lcm.reduce(sizes))):
        numbers = samples.number(jax.random.key(0), jnp.uint32(5), jnp.full(3, c))
        seen += np.asarray(samples.on(numbers, mean))
    whole = np.stack([d.mean(0) for d in data])
    np.testing.assert_allclose(seen / np.lcm.reduce(sizes), whole, rtol=2e-6)


class _Seen(aipod.AbstractLower):
    """Records which examples the gradients of each outer step saw."""

    lr: float = 1.0

    def init(self, problem, x, y):
        return jnp.zeros_like(y)

    def run(self, turn, state):
        def raw(point, batch):
            return jnp.zeros_like(turn.y).at[batch].add(1.0)

        samples = turn.problem.lower_samples
        seen, memory = turn.asked("gradient", raw, (turn.x, turn.y), samples, turn.key, turn.memory)
        return turn.y + seen, state, turn.lower_cost(lower_draws=1, memory=memory)


def _counting(examples, batch, epochs=True):
    data = jnp.arange(examples)
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x**2),
        lambda x, y, b: jnp.sum(y**2) / 2,
        lower_samples=aipod.Minibatches(data, batch, epochs=epochs),
    )
    return problem, aipod.Alternating(_Seen(), aipod.Zero(), aipod.EveryStep(lr=0.1))


def test_a_run_sees_every_example_once_in_an_epoch_also_after_a_resume(tmp_path):
    problem, solver = _counting(12, 4)
    x, y, key = jnp.ones(2), jnp.zeros(12), jax.random.key(0)
    whole = aipod.solve(problem, solver, x, y, steps=9, key=key)
    assert (np.asarray(whole.y) == 3).all()
    state = solver.init(problem, x, y)
    for k in range(6):
        state = solver.step(problem, state, key=key)
        if k in (2, 5):
            assert (np.asarray(state.y) == (k + 1) // 3).all()
    path = tmp_path / "run"
    aipod.solve(problem, solver, x, y, steps=4, key=key, checkpoint=path)
    part = aipod.solve(problem, solver, x, y, steps=9, key=key, checkpoint=path, resume=True)
    np.testing.assert_array_equal(part.y, whole.y)
    ends = [aipod.solve(problem, solver, x, y, steps=4, key=jax.random.key(s)).y for s in range(6)]
    assert len(np.unique(np.asarray(ends), axis=0)) > 1


def test_stateless_samplers_keep_their_streams():
    data = jnp.arange(50.0)
    key = jax.random.key(3)
    index = jax.random.randint(key, (8,), 0, 50)
    np.testing.assert_array_equal(aipod.Minibatches(data, 8)(key), data[index])
    problem, solver = _counting(12, 4, epochs=False)
    assert solver.init(problem, jnp.ones(2), jnp.zeros(12)).estimates is None
