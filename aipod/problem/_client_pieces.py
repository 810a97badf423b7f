"""Finite sums of clients, each in fixed minibatches of its own data."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import word_of
from aipod.problem._pieces import any_piece, client_words, in_epochs


class ClientBatch(eqx.Module):
    """One batch for each client, on the leading axis of `data`.

    `weights`, where given, says how much each example counts in its client's loss; a client with
    fewer examples than the axis is long has zeros at the end. Without, all count alike.
    """

    data: PyTree
    weights: Array | None = None


def pieces_of_clients(samples: Any) -> int:
    """How many fixed minibatches the largest client has."""
    return 1 if samples.per_client is None else -(-samples.pool // samples.per_client)


def sizes_of_clients(samples: Any, chosen: Array) -> Array:
    """How many fixed minibatches each of the chosen clients has."""
    if samples.counts is None or samples.per_client is None:
        return jnp.full(chosen.shape, pieces_of_clients(samples), jnp.int32)
    found: Array = -(-samples.counts[chosen] // samples.per_client)
    return found


def client_numbers(
    samples: Any, chosen: Array, key: PRNGKeyArray, word: Array, count: Array
) -> Array:
    """For each of the chosen clients the fixed minibatch of its draw number `count`."""
    if samples.per_client is None:
        return jnp.zeros(chosen.shape, jnp.int32)
    sizes = sizes_of_clients(samples, chosen)
    if samples.epochs:
        return in_epochs(client_words(word, chosen), count, sizes)
    return any_piece(client_words(word_of(key), chosen), sizes)


def on_client_pieces(
    samples: Any, counts: Array | None, number: Array, function: Callable[[Any], PyTree]
) -> PyTree:
    """function of each client's fixed minibatch.

    Weights make the mean over a client's own minibatches that of its data, also where the last one
    is smaller; where all are full there are none.
    """
    size, pool = samples.per_client, samples.pool
    if size is None or (counts is None and size >= pool):
        return function(samples.expected())
    size = min(size, pool)
    places = number[:, None] * size + jnp.arange(size)[None, :]
    whole = counts is None and pool % size == 0
    held = jnp.full(number.shape, pool) if counts is None else counts
    there = places < held[:, None]
    places = jnp.where(there, places, 0)
    data = jax.tree.map(
        lambda leaf: jax.vmap(jnp.take, (0, 0, None))(leaf, places, 0), samples.batch.data
    )
    if whole:
        return function(ClientBatch(data))
    share = -(-held // size) / held.astype(jnp.result_type(float))
    return function(ClientBatch(data, there * share[:, None]))
