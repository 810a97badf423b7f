"""The data of clients: on a common axis, and as samplers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from aipod.problem import ClientMinibatches, HostClientMinibatches


def stacked_data(data: PyTree | Sequence[PyTree], name: str) -> tuple[PyTree, np.ndarray | None]:
    """Client data on a common axis, and how many examples each client has."""
    if not isinstance(data, list):
        return data, None
    if not data:
        raise ValueError(f"{name} is an empty list: a federation needs at least one client.")
    first = [jax.tree.leaves(one)[:1] for one in data]
    if not all(leaf and np.ndim(leaf[0]) for leaf in first):
        raise ValueError(
            f"{name} is a list, so each entry must be one client's data: a pytree of arrays with "
            "the examples on their first axis."
        )
    counts = np.array([np.shape(leaf[0])[0] for leaf in first])
    if np.any(counts == 0):
        empty = np.flatnonzero(counts == 0)[:5].tolist()
        raise ValueError(f"{name}: clients {empty} have no example: leave them out.")
    longest = counts.max()

    def pad(*leaves: Any) -> np.ndarray:
        # Filled with the client's own examples, where every loss is finite; they count nothing.
        given = [np.asarray(leaf) for leaf in leaves]
        return np.stack([leaf[np.arange(longest) % len(leaf)] for leaf in given])

    return jax.tree.map(pad, *data), counts


def client_samples(
    data: PyTree, batch_size: int | None, counts: np.ndarray | None, *, epochs: bool, on_host: bool
) -> Any:
    """Batches of these data, on the device or from the host."""
    if not on_host:
        return ClientMinibatches(data, batch_size, counts=counts, epochs=epochs)
    if epochs:
        raise ValueError("epochs and on_host do not go together yet: leave one of them out.")
    return HostClientMinibatches(data, batch_size, counts=counts)
