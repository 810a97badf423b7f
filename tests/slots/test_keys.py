"""A key is drawn from or split, never both: who takes part in a round tells nothing of samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod._misc.keys import round_key, round_keys, subkey, subkeys

KEY = jax.random.key(11)
CLIENTS, EXAMPLES, SIZE = 8, 8, 2


class Spy(aipod.AbstractSampler):
    """Batches that hold the key they were drawn with."""

    size: int = 1

    def __call__(self, key):
        return jax.random.key_data(key).astype(jnp.float64)

    def expected(self):
        return jnp.zeros(2)


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def keys_of(solver, monkeypatch):
    """The keys that one outer step draws samples with, and those that it chooses clients with."""
    samples, rounds = set(), set()

    def seen(where):
        def note(word):
            where.add(tuple(int(w) for w in np.atleast_1d(word)))

        return note

    def objective(x, y, batch):
        jax.debug.callback(seen(samples), jax.lax.stop_gradient(batch).astype(jnp.uint32))
        return jnp.sum((y - x) ** 2) + 0.1 * jnp.sum(x**2)

    consensus = type(aipod.Consensus(participation=0.5).for_round(KEY))
    present = consensus._present

    def noting(self, clients):
        jax.debug.callback(seen(rounds), jax.random.key_data(self.key))
        return present(self, clients)

    monkeypatch.setattr(consensus, "_present", noting)
    one = aipod.Consensus(participation=0.5)
    problem = aipod.Bilevel(objective, objective, one, one, Spy(), Spy())
    x = jnp.ones((CLIENTS, 2))
    state = solver.init(problem, x, x)
    with jax.disable_jit():
        solver.traced_step(problem, state, KEY)
    return samples, rounds


# Without jit every operation is slow.
FEW = {"lower_steps": 3, "adjoint_steps": 3}
SOLVERS = {
    "aipod": lambda: aipod.AiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, **FEW),
    "aipod-batch": lambda: aipod.Alternating(
        aipod.ProjectedSGD(lr=0.1), aipod.Neumann(3, 0.1), aipod.EveryStep(lr=0.1), batch=3
    ),
    "e-aipod": lambda: aipod.EAiPOD(
        upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, lower_prob=1.0, upper_steps=3, **FEW
    ),
    "e2-aipod": lambda: aipod.E2AiPOD(
        upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, lower_prob=1.0, adjoint_prob=1.0, **FEW
    ),
    "e3-aipod": lambda: aipod.E3AiPOD(
        upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, damping=0.0, **FEW
    ),
    "fednest": lambda: aipod.FedNest(
        upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, upper_steps=3, lower_steps=3
    ),
    "simfbo": lambda: aipod.SimFBO(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, local_steps=2),
    "fedmbo": lambda: aipod.FedMBO(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, **FEW),
    "growing": lambda: aipod.Alternating(
        aipod.GrowingSGD(lr=0.1, growth=3.0), aipod.Neumann(3, 0.1), aipod.EveryStep(lr=0.1)
    ),
    "difference": lambda: aipod.Alternating(
        aipod.ProjectedSGD(lr=0.1),
        aipod.PerturbedLower(aipod.ProjectedSGD(lr=0.1)),
        aipod.DifferenceStep(lr=0.1),
    ),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_no_key_serves_a_sample_and_a_round(name, monkeypatch):
    samples, rounds = keys_of(SOLVERS[name](), monkeypatch)
    assert samples
    assert rounds
    assert not samples & rounds


def test_the_clients_of_a_round_do_not_follow_the_examples_of_a_batch():
    """Both are permutations: with one key for both they would be the same set every time."""
    data = jnp.arange(float(EXAMPLES))
    sampler = aipod.Minibatches(data, SIZE, replace=False)
    consensus = aipod.Consensus(participation=SIZE / CLIENTS)
    equal = 0
    for index in range(400):
        key = subkey(KEY, index)
        draw_key, chosen = subkeys(key, 2)[1], consensus.for_round(round_key(key, 1))
        present = np.flatnonzero(np.asarray(chosen._present(CLIENTS)))
        equal += set(present) == set(np.asarray(sampler(draw_key)).astype(int))
    # Independent draws of 2 out of 8 agree with probability 1/28: 14 of 400, give or take 11.
    assert 3 <= equal <= 30


def test_round_keys_are_apart_from_sample_keys():
    below = {words(key) for key in subkeys(KEY, 1000)}
    above = {words(key) for key in round_keys(KEY, 1000)}
    assert len(below) == len(above) == 1000
    assert not below & above
