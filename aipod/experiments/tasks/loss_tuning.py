"""Federated learning from imbalanced data by tuning the loss, the paper's Figure 3.

    min over x of   mean_m  sum_n omega_{l_n} CE(h(y*(x); d_n), l_n)   on validation data
    y*(x) = argmin  mean_m  sum_n CE(delta h(y; d_n) + tau, l_n)       on training data

y is a whole network h, x = (delta, tau) scales and shifts the logits of each class (the
vector-scaling loss), delta through softplus so that it stays positive. The upper weights omega are
fixed, proportional to the inverse frequency of each class. Learning them, as the paper writes,
would send them to 0, which minimises the upper loss. Weights of the *lower* loss, normalised to
mean 1, can be learned instead (`learn_weights`). Section 6 of the paper (`fig:name3`).
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod import federated
from aipod.experiments.base import Experiment, Metric, Panel, Picture, Task, option, varied
from aipod.experiments.limits import SHARE
from aipod.experiments.tasks.images import (
    ImageOptions,
    Layer,
    apply,
    class_accuracies,
    cross_entropy,
    deal,
    federation,
    layer,
    references,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Network = tuple[Layer, Layer]
# delta before softplus, tau, and the logarithms of the lower weights.
Tuning = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Options(ImageOptions):
    imbalance: float = option(
        0.1, "examples of the rarest class as a share of the commonest's", SHARE
    )
    learn_weights: bool = option(False, "whether x also weights the classes in the lower loss")


def imbalanced(options: Options, labels: np.ndarray) -> np.ndarray:
    """Indices of a training set in which class i has ceil(n imbalance^(i / 9)) examples.

    n is 6,000 for MNIST; for smaller data sets it is the size of the largest class.
    """
    classes = int(labels.max()) + 1
    rng = np.random.default_rng([options.problem_seed, 2])
    members = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    most = min(6000, max(len(one) for one in members))
    counts = np.ceil(most * options.imbalance ** (np.arange(classes) / max(classes - 1, 1)))
    return np.concatenate([one[: int(n)] for one, n in zip(members, counts, strict=True)])


def logits(y: Network, images: Array) -> Array:
    first, last = y
    return apply(last, jax.nn.relu(apply(first, images)))


def scale(x: Tuning) -> Array:
    return jax.nn.softplus(x["delta"])


def tuned_logits(x: Tuning, y: Network, images: Array) -> Array:
    """Those that the network is trained with."""
    return scale(x)[None] * logits(y, images) + x["tau"][None]


def rarity(counts: np.ndarray) -> Array:
    """The inverse frequency of each class, with mean 1 over the examples that were counted."""
    return jnp.asarray(counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), float)


def weights(x: Tuning) -> Array:
    """The class weights of the lower loss; their mean is 1."""
    return jax.nn.softmax(x["log_weights"]) * x["log_weights"].size


# The initial delta: softplus(START) = 1.
START = float(np.log(np.expm1(1.0)))


def start(options: Options, pixels: int, classes: int) -> tuple[Tuning, Network]:
    """x and y before training."""
    rng = np.random.default_rng([options.problem_seed, 1])
    x = {"delta": jnp.full(classes, START), "tau": jnp.zeros(classes)}
    if options.learn_weights:
        x["log_weights"] = jnp.zeros(classes)
    return x, (layer(rng, pixels, options.hidden), layer(rng, options.hidden, classes))


def build(options: Options) -> Task:
    clients = deal(options, lambda labels: imbalanced(options, labels))
    classes = clients.classes
    counts = np.bincount(np.concatenate([part[1] for part in clients.train]), minlength=classes)
    omega = rarity(counts)

    def upper(x: Tuning, y: Network, batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        return jnp.mean(omega[labels] * cross_entropy(logits(y, images), labels))

    def lower(x: Tuning, y: Network, batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        losses = cross_entropy(tuned_logits(x, y, images), labels)
        if options.learn_weights:
            losses = weights(x)[labels] * losses
        return jnp.mean(losses)

    problem = federation(upper, lower, clients, options)
    images, labels = (jnp.asarray(part) for part in clients.test)

    def record(x: Tuning, y: Network) -> dict[str, Array]:
        # Evaluates the mean of the clients' models; this does not count as a round.
        found = logits(federated.average(y), images)
        by_class = class_accuracies(found, labels, classes)
        return {
            "accuracy": jnp.mean(by_class),
            "worst_class": jnp.min(by_class),
            "test_loss": jnp.mean(cross_entropy(found, labels)),
        }

    def draw(figure: "Figure", x: Tuning, y: Network) -> None:
        found = class_accuracies(logits(federated.average(y), images), labels, classes)
        draw_tuning(figure, federated.average(x), counts, np.asarray(found))

    begins = start(options, clients.pixels, classes)
    x0, y0 = (federated.replicate(tree, options.clients) for tree in begins)
    return Task(problem, x0, y0, record, picture=Picture(draw, _CAPTION, (9.6, 3.2)))


_CAPTION = (
    "How common each class is in the training data, the scale and the shift of its logit that the "
    "clients learned to train with, and how well the test images of the class are recognised."
)


def draw_tuning(figure: "Figure", x: Tuning, counts: np.ndarray, accuracies: np.ndarray) -> None:
    """Draws for each class its training examples, learned parameters and test accuracy."""
    learned = {"scale δ of the logit": scale(x), "shift τ of the logit": x["tau"]}
    if "log_weights" in x:
        learned["weight in the lower loss"] = weights(x)
    rows = {
        "training examples": (counts, "#8a8a8a"),
        **{name: (np.asarray(value), "#0072B2") for name, value in learned.items()},
        "test accuracy": (accuracies, "#009E73"),
    }
    classes = np.arange(len(counts))
    places = figure.subplots(1, len(rows))
    for place, (name, (value, colour)) in zip(places, rows.items(), strict=True):
        place.bar(classes, value, color=colour)
        place.set_title(name)
        place.set_xlabel("class")
        place.set_xticks(classes)
        place.set_axisbelow(True)
        place.grid(axis="x", visible=False)
    places[1].axhline(1, color="black", linewidth=0.8, linestyle="dotted")
    places[-1].set_ylim(min(0.8, 0.95 * accuracies.min()), 1)


def panels(options: Options) -> tuple[Panel, ...]:
    """The paper's Figure 3, and a panel with E3-AiPOD."""
    return (
        Panel("How often y is averaged", varied("e-aipod:lower_prob", (1, 0.3, 0.1))),
        Panel("E-AiPOD and FedNest", (*varied("e-aipod:upper_steps", (1, 5)), "fednest")),
        Panel("One round per step", ("e-aipod:upper_steps=1", "fednest", "e3-aipod")),
    )


_SHARED = {"upper_lr": 0.01, "adjoint_steps": 3, "damping": 0.1}
_EFFICIENT = _SHARED | {"lower_lr": 0.04, "lower_steps": 20}
_NEST = _SHARED | {"lower_lr": 0.02, "lower_steps": 3, "lower_episodes": 3}

EXPERIMENT = Experiment(
    name="loss-tuning",
    options=Options,
    build=build,
    panels=panels,
    references=functools.partial(references, "loss_tuning"),
    metrics=(
        Metric("accuracy", "balanced test accuracy", log=False, better="larger"),
        Metric("worst_class", "accuracy of the worst class", log=False, better="larger"),
        Metric("test_loss", "test loss"),
    ),
    axes=("rounds", "bytes_up"),
    arguments={
        "e3-aipod": {},
        "e-aipod": _EFFICIENT | {"lower_prob": 0.3},
        "aipod": _EFFICIENT,
        "e2-aipod": _EFFICIENT | {"lower_prob": 0.3, "adjoint_prob": 0.3},
        "fednest": _NEST,
        "lfednest": _NEST,
    },
    steps=200,
    every=5,
)
