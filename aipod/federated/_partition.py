"""Who has which examples: partitions of a labelled data set over clients."""

import abc
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from aipod._misc.keys import as_key
from aipod.stepsize import as_number, check_positive, check_steps


def check_clients(clients: Any) -> None:
    """Raises `ValueError` unless clients is a whole number, at least 1."""
    whole = isinstance(clients, int | np.integer) and not isinstance(clients, bool)
    if not whole or clients < 1:
        raise ValueError(f"clients must be at least 1, a whole number, got {clients!r}.")


class AbstractScheme(eqx.Module):
    """A rule that deals examples to clients."""

    @property
    def least(self) -> int:
        """The fewest examples per client that it can deal."""
        return 1

    @abc.abstractmethod
    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The indices of each client's examples."""


class IID(AbstractScheme):
    """A random deal: every client sees all classes.

    !!! example
        ```python
        parts = aipod.federated.partition(labels, 10, aipod.federated.IID(), key=key)
        ```
    """

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)


class Shards(AbstractScheme):
    """Sort by label, cut into clients x per_client shards, and deal `per_client` to each.

    With 2 shards a client sees about two classes: the paper's non-IID partition.

    !!! example
        ```python
        parts = aipod.federated.partition(labels, 50, aipod.federated.Shards(2), key=key)
        ```
    """

    per_client: int = eqx.field(static=True, default=2)

    @property
    def least(self) -> int:
        return self.per_client

    def __check_init__(self) -> None:
        check_steps(self.per_client, "Shards: per_client")

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        # Shuffled first, so that within a class the shards are random.
        order = rng.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(order, clients * self.per_client)
        dealt = rng.permutation(len(shards)).reshape(clients, self.per_client)
        return [np.concatenate([shards[i] for i in row]) for row in dealt]


class Dirichlet(AbstractScheme):
    """Each class is dealt in proportions from a Dirichlet distribution; small alpha, few owners.

    Every client gets at least one example.

    !!! example
        ```python
        parts = aipod.federated.partition(labels, 50, aipod.federated.Dirichlet(0.1), key=key)
        ```
    """

    alpha: float = 0.1

    def __check_init__(self) -> None:
        check_positive(self.alpha, "Dirichlet: alpha")

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, self.alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
        dealt = [np.concatenate(part) for part in parts]
        # A client without data is no client: the richest ones give one example each.
        for client in np.flatnonzero([len(part) == 0 for part in dealt]):
            richest = int(np.argmax([len(part) for part in dealt]))
            dealt[client], dealt[richest] = dealt[richest][:1], dealt[richest][1:]
        return dealt


def partition(
    labels: ArrayLike,
    clients: int,
    scheme: AbstractScheme = IID(),
    *,
    key: PRNGKeyArray,
) -> list[np.ndarray]:
    """The indices of each client's examples; together they are all examples, once each.

    **Arguments:**

    - `labels`: the class of each example.
    - `clients`: how many clients.
    - `scheme`: `IID()`, `Shards(2)` or `Dirichlet(0.1)`.
    - `key`: the randomness of the deal.

    !!! example
        ```python
        parts = aipod.federated.partition(labels, 50, aipod.federated.Shards(2), key=key)
        train = [(images[i], labels[i]) for i in parts]
        ```
    """
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must be a vector of classes, got shape {labels.shape}.")
    check_clients(clients)
    if not isinstance(scheme, AbstractScheme):
        raise ValueError(
            "scheme must be one of aipod.federated, such as IID(), Shards(2) or Dirichlet(0.1), "
            f"got {scheme!r}."
        )
    needed = clients * scheme.least
    if len(labels) < needed:
        raise ValueError(
            f"{len(labels)} examples are too few for {clients} clients under "
            f"{type(scheme).__name__}: at least {needed} are needed."
        )
    return scheme.deal(labels, clients, _generator(key))


def split(
    parts: Sequence[np.ndarray], share: float, *, key: PRNGKeyArray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each client's indices in two: about `share` of them first, the rest second.

    A client with a single example has it in both.

    !!! example
        ```python
        train, validation = aipod.federated.split(parts, 0.8, key=key)
        ```
    """
    number = as_number(share, "share")
    if number is None or not 0 < number < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}.")
    rng = _generator(key)
    first, second = [], []
    for part in parts:
        mixed = rng.permutation(part)
        cut = min(max(1, round(share * len(mixed))), max(1, len(mixed) - 1))
        first.append(mixed[:cut])
        second.append(mixed[cut:] if len(mixed) > 1 else mixed)
    return first, second


def _generator(key: PRNGKeyArray) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(as_key(key))))
