"""Shared by the paper's two federated tasks: clients with images, a network, accuracies."""

import csv
import dataclasses
from collections.abc import Callable
from importlib import resources
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod import data, federated
from aipod.experiments.base import Columns, Reference, option
from aipod.experiments.limits import SHARE, at_least, check_limits
from aipod.federated import IID, Dirichlet, Shards
from aipod.problem import Bilevel, Objective

# One layer, weights first. A network is a list of them.
Layer = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    data: Literal["digits", "mnist"] = option("digits", "the images")
    data_dir: str | None = option(None, "the folder of MNIST's four files, else $AIPOD_DATA")
    clients: int = option(50, "how many clients share the images", at_least(1))
    partition: Literal["shards", "dirichlet", "iid"] = option("shards", "how they are dealt")
    shards: int = option(2, "label shards of each client, for the partition shards", at_least(1))
    alpha: float = option(0.1, "concentration, for the partition dirichlet; small: few owners")
    participation: float = option(1.0, "share of the clients in each round", SHARE)
    hidden: int = option(200, "hidden units of the network", at_least(1))
    batch_size: int | None = option(
        None, "examples of each client in a batch; else 256, digits 32", at_least(1)
    )
    problem_seed: int = option(0, "seed of the partition and of the starting point", at_least(0))

    def __post_init__(self) -> None:
        check_limits(self)


@dataclasses.dataclass(frozen=True)
class Clients:
    """Each client's training and validation examples, (images, labels), and the test set."""

    train: list[tuple[np.ndarray, np.ndarray]]
    validation: list[tuple[np.ndarray, np.ndarray]]
    test: data.Split
    classes: int

    @property
    def pixels(self) -> int:
        return int(self.test.images.shape[1])


def deal(
    options: ImageOptions, chosen: Callable[[np.ndarray], np.ndarray] | None = None
) -> Clients:
    """Distributes the images; a fifth of each client's examples is its validation set.

    `chosen` selects examples from their labels; None takes all.
    """
    images = _standardised(data.load(options.data, options.data_dir))
    labels = images.train.labels
    kept = np.arange(len(labels)) if chosen is None else chosen(labels)
    schemes = {
        "shards": lambda: Shards(options.shards),
        "dirichlet": lambda: Dirichlet(options.alpha),
        "iid": IID,
    }
    deal_key, split_key = jax.random.split(jax.random.key(options.problem_seed))
    parts = federated.partition(
        labels[kept], options.clients, schemes[options.partition](), key=deal_key
    )
    train, validation = federated.split([kept[part] for part in parts], 0.8, key=split_key)

    def of(parts: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(images.train.images[part], labels[part]) for part in parts]

    return Clients(of(train), of(validation), images.test, images.classes)


def _standardised(images: data.Dataset) -> data.Dataset:
    """Pixels shifted and scaled to mean 0 and variance 1 over the training images."""
    mean, deviation = images.train.images.mean(), images.train.images.std()

    def scaled(part: data.Split) -> data.Split:
        return data.Split((part.images - mean) / deviation, part.labels)

    return data.Dataset(scaled(images.train), scaled(images.test), images.classes)


def federation(
    upper: Objective, lower: Objective, clients: Clients, options: ImageOptions
) -> Bilevel:
    """Makes the federated problem; clients of equal size need no padding and no weights."""
    return federated.federate(
        upper,
        lower,
        _stacked(clients.validation),
        _stacked(clients.train),
        batch_size=options.batch_size or (256 if options.data == "mnist" else 32),
        participation=options.participation,
    )


def _stacked(parts: list[tuple[np.ndarray, np.ndarray]]) -> PyTree:
    if len({len(labels) for _, labels in parts}) > 1:
        return parts
    return tuple(np.stack(arrays) for arrays in zip(*parts, strict=True))


def layer(rng: np.random.Generator, inputs: int, outputs: int) -> Layer:
    """Draws weights and biases uniformly from +- 1 / sqrt(inputs)."""
    bound = 1 / np.sqrt(inputs)
    weights = rng.uniform(-bound, bound, size=(inputs, outputs))
    return jnp.asarray(weights, float), jnp.asarray(rng.uniform(-bound, bound, outputs), float)


def apply(layer: Layer, inputs: Array) -> Array:
    weights, bias = layer
    return inputs @ weights + bias[None]


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The cross-entropy of each example."""
    scores = jax.nn.log_softmax(logits)
    # Not looked up by index: the derivative of that is a scatter, two more kernels on a GPU.
    its_own = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    return -jnp.sum(jnp.where(its_own, scores, 0.0), axis=-1)


def squared_norm(tree: PyTree) -> Array:
    return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


def class_accuracies(logits: Array, labels: Array, classes: int) -> Array:
    """The accuracy of each class; 0 for a class without examples."""
    members = jax.nn.one_hot(labels, classes)
    right = (jnp.argmax(logits, axis=-1) == labels).astype(members.dtype)
    return right @ members / jnp.maximum(jnp.sum(members, axis=0), 1)


def references(task: str, options: ImageOptions) -> tuple[Reference, ...]:
    """Results of the published codes on this task, which ran on MNIST only."""
    if options.data != "mnist":
        return ()
    panels = ("E-AiPOD and FedNest", "One round per step")
    return (
        Reference(panels, "published E-AiPOD code", published(f"eaipod_{task}")),
        Reference(panels, "published FedNest code", published(f"fednest_{task}")),
    )


def published(name: str) -> Columns:
    """Reads a curve of a published research code; see `published/README.md`."""
    file = resources.files("aipod.experiments.tasks").joinpath("published", f"{name}.csv")
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}
