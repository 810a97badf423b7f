"""Batches of every client of a federation, on a leading client axis."""

import dataclasses
from collections.abc import Callable
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod.problem._client_pieces import (
    ClientBatch,
    client_numbers,
    on_client_pieces,
    pieces_of_clients,
    sizes_of_clients,
)
from aipod.problem._samplers import AbstractSampler, as_data, check_batch_size, leading_length


class ClientMinibatches(AbstractSampler):
    """Batches of `batch_size` examples of each client, drawn uniformly with replacement.

    **Arguments:**

    - `data`: a pytree of arrays with axes (client, example, ...).
    - `batch_size`: examples of each client in a batch; None for all of them, every time.
    - `counts`: how many examples each client has, where some have fewer than the axis is long.
    - `epochs`: visit fixed minibatches of each client in a new random order in every epoch, as
        `Minibatches` does.

    !!! example
        ```python
        samples = aipod.ClientMinibatches((inputs, labels), 64)  # inputs: (clients, examples, d)
        ```
    """

    batch: PyTree
    counts: Array | None
    clients: int = eqx.field(static=True)
    pool: int = eqx.field(static=True)
    per_client: int | None = eqx.field(static=True)
    epochs: bool = eqx.field(static=True)

    def __init__(
        self,
        data: PyTree,
        batch_size: int | None,
        *,
        counts: ArrayLike | None = None,
        epochs: bool = False,
    ) -> None:
        data = as_data(data, "ClientMinibatches")
        self.clients = leading_length(data, "ClientMinibatches")
        shapes = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(data)}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(
                "ClientMinibatches: every array of data must have the axes (client, example, ...), "
                f"the first two alike; the shapes are {sorted(shapes)}."
            )
        self.pool = next(iter(shapes))[1]
        self.per_client = None if batch_size is None else check_batch_size(batch_size)
        self.counts = checked_counts(counts, self.clients, self.pool)
        self.epochs = epochs
        whole = ClientBatch(data)
        self.batch = weighted(whole, self.counts) if batch_size is None else whole

    @property
    def size(self) -> int:
        """Examples in one draw, of all clients together."""
        return self.clients * (self.pool if self.per_client is None else self.per_client)

    @property
    def pieces(self) -> int:
        """How many fixed minibatches the largest client has."""
        return pieces_of_clients(self)

    @property
    def sizes(self) -> Array:
        """How many fixed minibatches each client has."""
        return sizes_of_clients(self, jnp.arange(self.clients))

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """For each client the fixed minibatch of its draw number `count`."""
        return client_numbers(self, jnp.arange(self.clients), key, word, count)

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function of each client's fixed minibatch, weighted as in `Minibatches`."""
        return on_client_pieces(self, self.counts, number, function)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.per_client is None:
            return self.expected()
        shape = (self.clients, self.per_client)
        return _examples(self.batch, places(key, shape, self.pool, self.counts))

    def expected(self) -> PyTree:
        return self.batch if self.per_client is None else weighted(self.batch, self.counts)

    @property
    def random(self) -> bool:
        return self.per_client is not None

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> Self | None:
        # Pool and batch are both counted for each client.
        return self.map(function) if self.pool <= draws * (self.per_client or self.pool) else None

    def by_client(self) -> Self:
        """True for what has a row for each client."""
        mask = jax.tree.map(lambda _: False, self)
        return eqx.tree_at(lambda s: s.batch, mask, jax.tree.map(lambda _: True, self.batch))

    def take(self, chosen: Array, members: int) -> "CohortMinibatches":
        """The batches of the chosen clients, each as it always draws them."""
        # The barrier keeps XLA from gathering them anew in each of the places that read them.
        batch = jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[chosen], self.batch))
        return CohortMinibatches(
            batch,
            self.counts,
            chosen,
            self.clients,
            members,
            self.pool,
            self.per_client,
            self.epochs,
        )

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
        return eqx.tree_at(lambda s: s.batch, self, function(self.batch))


class CohortMinibatches(AbstractSampler):
    """The batches of some clients of `ClientMinibatches`, those of one outer step.

    - `batch`: their data.
    - `counts`: how many examples each of all clients has; None where all have as many.
    - `chosen`: which of all the `clients` they are.
    - `members`: how many of the rows are clients; the others fill up the devices of a mesh.
    """

    batch: PyTree
    counts: Array | None
    chosen: Array
    clients: int = eqx.field(static=True)
    members: int = eqx.field(static=True)
    pool: int = eqx.field(static=True)
    per_client: int | None = eqx.field(static=True)
    epochs: bool = eqx.field(static=True, default=False)

    @property
    def size(self) -> int:
        """Examples in one draw, of the cohort together."""
        return self.members * (self.pool if self.per_client is None else self.per_client)

    @property
    def pieces(self) -> int:
        """How many fixed minibatches the largest client has."""
        return pieces_of_clients(self)

    @property
    def sizes(self) -> Array:
        """How many fixed minibatches each of these clients has."""
        return sizes_of_clients(self, self.chosen)

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """For each of these clients the fixed minibatch of its draw number `count`."""
        return client_numbers(self, self.chosen, key, word, count)

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function of each client's fixed minibatch, weighted as in `Minibatches`."""
        counts = None if self.counts is None else self.counts[self.chosen]
        return on_client_pieces(self, counts, number, function)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.per_client is None:
            return self.expected()
        # Drawn for all clients: what one of them sees does not depend on who else is there.
        shape = (self.clients, self.per_client)
        index = places(key, shape, self.pool, self.counts)[self.chosen]
        return _examples(self.batch, index)

    def expected(self) -> PyTree:
        if self.per_client is None or self.counts is None:
            return self.batch
        return weighted(self.batch, self.counts[self.chosen])

    @property
    def random(self) -> bool:
        return self.per_client is not None

    def precomputed(
        self, function: Callable[[PyTree], PyTree], draws: int
    ) -> "CohortMinibatches | None":
        if self.pool > draws * (self.per_client or self.pool):
            return None
        return dataclasses.replace(self, batch=function(self.batch))

    def by_client(self) -> "CohortMinibatches":
        """True for what has a row for each of these clients."""
        mask = jax.tree.map(lambda _: False, self)
        rows = jax.tree.map(lambda _: True, self.batch)
        return dataclasses.replace(mask, batch=rows, chosen=True)


def checked_counts(counts: ArrayLike | None, clients: int, pool: int) -> Array | None:
    """How many examples each client has; None where all have as many as the axis is long."""
    if counts is None:
        return None
    given = np.asarray(counts)
    if given.shape != (clients,) or given.min() < 1 or given.max() > pool:
        raise ValueError(
            f"counts must give each of the {clients} clients at least 1 and at most {pool} "
            "examples: leave out clients that have none."
        )
    return jnp.asarray(given, jnp.int32) if given.min() < pool else None


def places(key: PRNGKeyArray, shape: tuple[int, int], pool: int, counts: Array | None) -> Array:
    """Which examples each client draws, a row for each."""
    return jax.random.randint(key, shape, 0, pool if counts is None else counts[:, None])


def _examples(batch: PyTree, places: Array) -> PyTree:
    """The examples at these places of each client's data."""
    return jax.tree.map(lambda leaf: jax.vmap(jnp.take, (0, 0, None))(leaf, places, 0), batch)


def weighted(batch: ClientBatch, counts: Array | None) -> ClientBatch:
    """The batch of all data; padded examples have weight 0."""
    if counts is None:
        return batch
    pool = jax.tree.leaves(batch.data)[0].shape[1]
    present = jnp.arange(pool)[None, :] < counts[:, None]
    share = 1 / counts.astype(jnp.result_type(float))
    return ClientBatch(batch.data, present * share[:, None])
