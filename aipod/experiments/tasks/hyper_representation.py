"""Federated hyper-representation learning, the paper's Figure 2.

    min over x of   mean_m  CE(x, y*(x); validation_m)
    y*(x) = argmin  mean_m  CE(x, y; train_m) + 0.05 ||y||^2

x is the first layer of a network and y its last, the same for all clients: both sets are
`Consensus`. Section 6 of the paper (`fig:name2`) and its appendix.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod import federated
from aipod.experiments.base import Experiment, Metric, Panel, Task, option, varied
from aipod.experiments.limits import NOT_NEGATIVE
from aipod.experiments.tasks.images import (
    ImageOptions,
    Layer,
    apply,
    cross_entropy,
    deal,
    federation,
    layer,
    references,
    squared_norm,
)
from aipod.problem import Composite


@dataclasses.dataclass(frozen=True)
class Options(ImageOptions):
    ridge: float = option(0.05, "the lower level's penalty on ||y||^2", NOT_NEGATIVE)


def features(x: Layer, batch: tuple[Array, Array]) -> Array:
    return jax.nn.relu(apply(x, batch[0]))


def objectives(ridge: float) -> tuple[Composite, Composite]:
    """One client's upper and lower loss."""

    def loss(hidden: Array, y: Layer, batch: tuple[Array, Array]) -> Array:
        return jnp.mean(cross_entropy(apply(y, hidden), batch[1]))

    def penalised(hidden: Array, y: Layer, batch: tuple[Array, Array]) -> Array:
        return loss(hidden, y, batch) + ridge * squared_norm(y)

    return Composite(features, loss), Composite(features, penalised)


def build(options: Options) -> Task:
    clients = deal(options)
    problem = federation(*objectives(options.ridge), clients, options)
    rng = np.random.default_rng([options.problem_seed, 1])
    x0 = layer(rng, clients.pixels, options.hidden)
    y0 = layer(rng, options.hidden, clients.classes)
    images, labels = (jnp.asarray(part) for part in clients.test)

    def record(x: Layer, y: Layer) -> dict[str, Array]:
        # Evaluates the mean of the clients' models; this does not count as a round.
        logits = apply(federated.average(y), features(federated.average(x), (images, labels)))
        return {
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == labels),
            "test_loss": jnp.mean(cross_entropy(logits, labels)),
        }

    x0, y0 = (federated.replicate(tree, options.clients) for tree in (x0, y0))
    return Task(problem, x0, y0, record)


def panels(options: Options) -> tuple[Panel, ...]:
    """The paper's Figure 2, and a panel with E3-AiPOD."""
    return (
        Panel("How often y is averaged", varied("e-aipod:lower_prob", (1, 0.5, 0.1, 0.05))),
        Panel("E-AiPOD and FedNest", ("e-aipod:lower_prob=0.1", "e2-aipod", "fednest", "lfednest")),
        Panel("One round per step", ("e-aipod:lower_prob=0.1", "fednest", "e3-aipod")),
    )


_SHARED = {"upper_lr": 0.01, "lower_lr": 0.05, "lower_steps": 20, "adjoint_steps": 5}

EXPERIMENT = Experiment(
    name="hyper-representation",
    options=Options,
    build=build,
    panels=panels,
    references=functools.partial(references, "hyper_representation"),
    metrics=(
        Metric("accuracy", "test accuracy", log=False, better="larger"),
        Metric("test_loss", "test loss"),
    ),
    axes=("rounds", "bytes_up"),
    arguments={
        "e3-aipod": {},
        "e-aipod": _SHARED | {"lower_prob": 0.1},
        "aipod": _SHARED,
        "e2-aipod": _SHARED | {"lower_prob": 0.1, "adjoint_prob": 0.3, "adjoint_steps": 10},
        "fednest": {
            "upper_lr": 0.01,
            "lower_lr": 0.02,
            "lower_steps": 10,
            "lower_episodes": 1,
            "adjoint_steps": 5,
        },
        "lfednest": {
            "upper_lr": 0.01,
            "lower_lr": 0.02,
            "lower_steps": 10,
            "lower_episodes": 1,
            "adjoint_steps": 5,
        },
        "fedavg": {"upper_lr": 0.01, "lower_lr": 0.02, "lower_steps": 10},
    },
    steps=200,
    every=5,
)
