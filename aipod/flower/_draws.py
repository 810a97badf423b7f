"""What a client draws from its data, and what it keeps of its draws.

By epochs, which examples come next follows from how many draws a client has made; an estimator,
such as `SAGA`, keeps derivatives of examples. Both stand in the client's own state, which is on its
disk. The server neither knows nor needs them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.algorithms import Alternating, State
from aipod.algorithms._estimates import first_estimates
from aipod.problem import AbstractSampler, Bilevel, ClientMinibatches
from aipod.problem._client_pieces import (
    client_numbers,
    on_client_pieces,
    pieces_of_clients,
    sizes_of_clients,
)
from aipod.slots._oracles import Memory

# How many outer steps a `Trail` goes back.
_LONGEST = 64


class OwnRow(AbstractSampler):
    """One client's row of what `ClientMinibatches` draws for all clients.

    The indices of all clients are drawn and one row is used, so that a client sees the same
    examples as in the simulation.
    """

    batch: PyTree
    # An array, so that clients with equally many examples share one compiled program.
    index: Array
    clients: int = eqx.field(static=True)
    pool: int = eqx.field(static=True)
    per_client: int | None = eqx.field(static=True)
    epochs: bool = eqx.field(static=True)
    # A client alone has as many examples as its own axis is long.
    counts: ClassVar[None] = None

    @staticmethod
    def of(samples: ClientMinibatches, index: int, clients: int) -> "OwnRow":
        kinds = samples.pool, samples.per_client, samples.epochs
        return OwnRow(samples.batch, jnp.asarray(index), clients, *kinds)

    @property
    def size(self) -> int:
        """Examples in one draw of all clients together, which is what the ledger counts."""
        return self.clients * (self.pool if self.per_client is None else self.per_client)

    @property
    def pieces(self) -> int:
        """How many fixed minibatches this client has."""
        return pieces_of_clients(self)

    @property
    def sizes(self) -> Array:
        return sizes_of_clients(self, self.index[None])

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """The fixed minibatch of this client's draw number `count`."""
        return client_numbers(self, self.index[None], key, word, count)

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function of a fixed minibatch, weighted as in `Minibatches`."""
        return on_client_pieces(self, None, number, function)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.per_client is None:
            return self.batch
        index = jax.random.randint(key, (self.clients, self.per_client), 0, self.pool)[self.index]
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=1), self.batch)

    @property
    def random(self) -> bool:
        return self.per_client is not None

    def expected(self) -> PyTree:
        return self.batch

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> "OwnRow | None":
        if self.pool > draws * (self.per_client or self.pool):
            return None
        return eqx.tree_at(lambda s: s.batch, self, function(self.batch))


def with_first_draws(solver: Alternating, problem: Bilevel, state: State) -> State:
    """A client's first state, with what it keeps of its draws: in epochs, or for an estimator."""
    return dataclasses.replace(state, estimates=first_estimates(solver, problem, state.x, state.y))


def own_draws(mask: State) -> State:
    """The mask of a client's own leaves, with what it keeps of its draws among them."""
    return dataclasses.replace(mask, estimates=jax.tree.map(lambda _: True, mask.estimates))


class Trail:
    """The numbers of a client's draws at the beginning of its newest outer steps.

    The server may send a client back to an earlier step: a client may make steps before it needs an
    answer, and its reply may be lost; or the others go on from older copies of their disks. What
    the client has drawn since that step does not count then.
    """

    def __init__(self, rows: Mapping[int, np.ndarray] | None = None) -> None:
        self._rows = dict(rows or {})

    @staticmethod
    def read(columns: Mapping[str, np.ndarray]) -> "Trail":
        """From the columns of a client's state on disk."""
        if "drawn before" not in columns:
            return Trail()
        steps = columns["drawn before"].tolist()
        return Trail(dict(zip(steps, columns["drawn"], strict=True)))

    def columns(self) -> dict[str, np.ndarray]:
        if not self._rows:
            return {}
        steps = np.array(list(self._rows), np.int64)
        return {"drawn before": steps, "drawn": np.stack(list(self._rows.values()))}

    def note(self, state: State) -> None:
        """A step begins from this state."""
        leaves = [np.ravel(leaf) for leaf in _numbers(state.estimates)]
        if leaves:
            self._rows[int(state.step)] = np.concatenate(leaves)
            for step in sorted(self._rows)[:-_LONGEST]:
                del self._rows[step]

    def followed(self, state: State) -> State:
        """The state with the draws from before its step.

        Where the client has not been at that step, it goes on from the draws that it has made.
        """
        row = self._rows.get(int(state.step))
        if row is None:
            return state
        leaves = _numbers(state.estimates)
        parts = np.split(row, np.cumsum([leaf.size for leaf in leaves])[:-1])
        new = [
            jnp.asarray(part.reshape(leaf.shape), leaf.dtype)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return eqx.tree_at(lambda s: _numbers(s.estimates), state, new)


def _numbers(estimates: PyTree) -> list[Array]:
    """How many draws there were; derivatives that an estimator keeps are as good as before."""
    memories = jax.tree.leaves(estimates, is_leaf=lambda node: isinstance(node, Memory))
    return [one for memory in memories for one in (memory.count, memory.clock, memory.extra)]
