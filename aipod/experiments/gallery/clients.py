"""Federations of eight clients with unlike data."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod import federated
from aipod.data import digits
from aipod.experiments.gallery.exhibit import Setting
from aipod.experiments.gallery.features import Parameters, decay, hidden, layer
from aipod.experiments.gallery.hyperparameters import log_loss, squares
from aipod.experiments.gallery.samples import Table, diabetes, tumours
from aipod.problem import Composite

Batch = tuple[Array, Array]
_CLIENTS = 8


def _dealt(data: Table, by: np.ndarray) -> tuple[list[Table], list[Table]]:
    """Eight clients with neighbours in the order of `by`: half of each to train on."""
    parts = np.array_split(np.argsort(by, kind="stable"), _CLIENTS)
    # In the order of the data, which is random, so that both halves are alike.
    parts = [np.sort(part) for part in parts]
    train = [Table(data.inputs[p[::2]], data.targets[p[::2]]) for p in parts]
    rest = [Table(data.inputs[p[1::2]], data.targets[p[1::2]]) for p in parts]
    return train, rest


def _spread(x: Array | Parameters, y: Array) -> tuple:
    return federated.replicate(x, _CLIENTS), federated.replicate(y, _CLIENTS)


def ridge() -> Setting:
    """A log-penalty for each feature; each hospital has patients of another body mass."""
    data = diabetes()
    scaled = Table(data.inputs, (data.targets - data.targets.mean()) / 77)
    train, rest = ([tuple(part) for part in parts] for parts in _dealt(scaled, data.inputs[:, 2]))
    problem = federated.federate(
        lambda x, y, batch: squares(y, batch) + 1e-3 * jnp.sum(x**2),
        lambda x, y, batch: squares(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        rest,
        train,
        batch_size=8,
    )
    return Setting(problem, *_spread(jnp.zeros(10), jnp.zeros(10)))


def representation() -> Setting:
    """Eight features of the digits with a ridge classifier; each client has few of the classes."""
    images, labels = digits().train
    data = Table(images[:960].astype(float), np.eye(10)[labels[:960]])
    train, rest = ([tuple(part) for part in parts] for parts in _dealt(data, labels[:960]))

    def features(x: Parameters, batch: Batch) -> Array:
        return hidden(x, batch[0])

    def error(units: Array, y: Array, batch: Batch) -> Array:
        return 0.5 * jnp.mean(jnp.sum((units @ y - batch[1]) ** 2, axis=1))

    problem = federated.federate(
        lambda x, y, batch: error(features(x, batch), y, batch) + 1e-4 * decay(x),
        Composite(features, lambda units, y, batch: error(units, y, batch) + 0.005 * jnp.sum(y**2)),
        rest,
        train,
        batch_size=32,
    )
    return Setting(problem, *_spread(layer(0, 64, 8), jnp.zeros((9, 10))))


def trust() -> Setting:
    """The log-odds of trust in each of eight clinics, three of which confuse many labels.

    Every clinic has clean validation data. The clinics differ in the size of their tumours too.
    """
    data = tumours().with_constant()
    signed = Table(data.inputs, 2.0 * data.targets - 1)
    rng = np.random.default_rng(0)
    # Neighbours in size with much noise: every clinic has both kinds of tumours.
    train, rest = _dealt(signed, data.inputs[:, 0] + rng.normal(size=len(data.targets)))
    wrong = {1: 0.4, 4: 0.5, 6: 0.6}
    told = []
    for client, part in enumerate(train):
        flipped = rng.uniform(size=len(part.targets)) < wrong.get(client, 0.0)
        labels = np.where(flipped, -part.targets, part.targets)
        told.append((part.inputs, labels, np.full(len(labels), client)))

    def lower(x: Array, y: Array, batch: tuple[Array, Array, Array]) -> Array:
        inputs, labels, client = batch
        trusted = jax.nn.sigmoid(x)[client[0].astype(int)]
        return trusted * log_loss(y, (inputs, labels)) + 0.01 * jnp.sum(y**2)

    problem = federated.federate(
        lambda x, y, batch: log_loss(y, batch) + 1e-3 * jnp.sum(x**2),
        lower,
        [tuple(part) for part in rest],
        told,
        batch_size=16,
    )
    return Setting(problem, *_spread(jnp.zeros(_CLIENTS), jnp.zeros(31)))
