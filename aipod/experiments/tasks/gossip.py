"""Clients without a server: each talks to its neighbours in a graph, and keeps its own x and y.

Two tasks. Hyper-representation learning is that of `hyper-representation`: x is the first layer of
a network, y its last. In `cleaning` half of the training labels are wrong; x has one entry for each
training example of any client, whose sigmoid is its weight, and y is a softmax regression:

    min over x of   mean_m  loss(y*(x); clean examples of m)
    y*(x) = argmin  mean_m  mean over examples i of m of  sigmoid(x_i) loss_i(y) + ridge / 2 ||y||^2

Both sets are `aipod.Gossip`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod import federated
from aipod.experiments.base import Columns, Experiment, Metric, Panel, Picture, Task, option
from aipod.experiments.limits import SHARE, at_least, check_limits
from aipod.experiments.tasks import cleaning, hyper_representation
from aipod.experiments.tasks.images import cross_entropy
from aipod.sets import Gossip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The share of training labels that are wrong, in the cleaning task.
_CORRUPTED = 0.5


@dataclasses.dataclass(frozen=True)
class Options(hyper_representation.Options):
    clients: int = option(16, "clients, each with its own images", at_least(1))
    task: Literal["hyper-representation", "cleaning"] = option(
        "hyper-representation", "what the clients learn"
    )
    graph: Literal["ring", "grid", "exponential", "complete", "erdos-renyi"] = option(
        "exponential", "who talks to whom"
    )
    links: float = option(1.0, "share of the links that work in a round", SHARE)

    def __post_init__(self) -> None:
        check_limits(self)
        if self.participation != 1:
            raise ValueError("participation is about clients: with gossip set links instead.")


def gossip_of(options: Options) -> Gossip:
    random = options.graph == "erdos-renyi"
    key = jax.random.key(options.problem_seed) if random else None
    return Gossip(options.graph, options.clients, participation=options.links, key=key)


def disagreement(point: PyTree) -> Array:
    """How far clients are from their mean, relative to its size."""
    mean = federated.average(point)
    pairs = list(zip(jax.tree.leaves(point), jax.tree.leaves(mean), strict=True))
    apart = sum((jnp.sum((rows - one[None]) ** 2) for rows, one in pairs), jnp.zeros(()))
    size = sum((rows.shape[0] * jnp.sum(one**2) for rows, one in pairs), jnp.zeros(()))
    return jnp.sqrt(apart / jnp.where(size > 0, size, 1.0))


def build(options: Options) -> Task:
    graph = gossip_of(options)
    if options.task == "cleaning":
        task = _cleaning(options, graph)
    else:
        task = hyper_representation.build(options)
        problem = dataclasses.replace(task.problem, upper_set=graph, lower_set=graph)
        task = dataclasses.replace(task, problem=problem)

    def record(x: PyTree, y: PyTree) -> dict[str, Any]:
        apart = {"x_disagreement": disagreement(x), "y_disagreement": disagreement(y)}
        return task.record(x, y) | apart

    def draw(figure: "Figure", x: PyTree, y: PyTree) -> None:
        draw_graph(figure, graph)

    caption = (
        f"Left: who talks to whom, {options.clients} clients (spectral gap {graph.gap:.2g}). "
        "Right: how far the clients' x and y are from their means, relative to these."
    )
    picture = Picture(draw, caption, (9.0, 3.8), draw_disagreement)
    return dataclasses.replace(task, record=record, picture=picture)


def _cleaning(options: Options, graph: Gossip) -> Task:
    plain = cleaning.Options(
        data=options.data,
        data_dir=options.data_dir,
        corrupted=_CORRUPTED,
        problem_seed=options.problem_seed,
    )
    data = cleaning.mixture(plain)
    size, clients = len(data.truth), options.clients
    rng = np.random.default_rng([options.problem_seed, 2])

    def dealt(examples: cleaning.Examples, *more: np.ndarray) -> tuple[np.ndarray, ...]:
        # Equal shares: a few examples may be left over.
        count = len(examples.labels) // clients * clients
        chosen = rng.permutation(len(examples.labels))[:count].reshape(clients, -1)
        parts = (examples.inputs.astype(float), examples.labels, *more)
        return tuple(part[chosen] for part in parts)

    def upper(x: Array, y: Array, batch: tuple[Array, Array]) -> Array:
        return jnp.mean(cleaning.losses(y, *batch))

    def lower(x: Array, y: Array, batch: tuple[Array, Array, Array]) -> Array:
        inputs, labels, index = batch
        weighted = jax.nn.sigmoid(x[index]) * cleaning.losses(y, inputs, labels)
        return jnp.mean(weighted) + 0.5 * plain.ridge * jnp.sum(y**2)

    problem = federated.federate(
        upper,
        lower,
        dealt(data.validation),
        dealt(data.training, np.arange(size)),
        batch_size=options.batch_size or 32,
        graph=graph,
    )
    inputs, labels = (jnp.asarray(part) for part in data.test)
    right = jnp.asarray(~data.wrong)

    def record(x: Array, y: Array) -> dict[str, Array]:
        weights, mean = federated.average(x), federated.average(y)
        logits = inputs @ mean
        return {
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == labels),
            "test_loss": jnp.mean(cross_entropy(logits, labels)),
            "auc": cleaning.area_under_curve(weights, right),
        }

    y0 = jnp.zeros((inputs.shape[1], data.classes))
    start = [federated.replicate(point, clients) for point in (jnp.zeros(size), y0)]
    return Task(problem, start[0], start[1], record)


def draw_graph(figure: "Figure", graph: Gossip) -> None:
    """Draws the clients on a circle, and the links between them."""
    place: Any = figure.subplots()
    angle = np.pi / 2 - 2 * np.pi * np.arange(graph.clients) / graph.clients
    spot = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for pair in graph.edges:
        place.plot(*spot[pair].T, color="#0072B2", linewidth=0.8, alpha=0.6, zorder=1)
    place.scatter(*spot.T, s=60, color="#D55E00", zorder=2)
    if graph.clients <= 30:
        for client, (across, up) in enumerate(1.14 * spot):
            place.text(across, up, str(client), ha="center", va="center", fontsize=7)
    place.set_aspect("equal")
    place.axis("off")


def draw_disagreement(figure: "Figure", columns: Columns) -> None:
    """Draws how far clients are apart, over the rounds."""
    place: Any = figure.subplots()
    shown = (("x_disagreement", "x", "#0072B2", "-"), ("y_disagreement", "y", "#D55E00", "--"))
    for name, label, colour, style in shown:
        values = np.maximum(columns[name], 1e-17)
        place.semilogy(columns["rounds"], values, style, color=colour, label=label)
    place.set(xlabel="communication rounds", ylabel="disagreement")
    place.legend()


def panels(options: Options) -> tuple[Panel, ...]:
    return (
        Panel("Without a server", ("e3-aipod", "sparkle", "d-soba")),
        Panel("The paper's methods, uncorrected", ("e3-aipod", "e2-aipod", "e-aipod")),
    )


_SHARED = {"upper_lr": 0.1, "lower_steps": 20, "lower_prob": 0.1}

EXPERIMENT = Experiment(
    name="gossip",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("accuracy", "test accuracy", log=False, better="larger"),
        Metric("test_loss", "test loss"),
        Metric("x_disagreement", "disagreement of x"),
    ),
    axes=("rounds", "bytes_per_link"),
    arguments={
        "e3-aipod": {},
        "sparkle": {"upper_lr": 0.3},
        "d-soba": {"upper_lr": 0.3},
        "e2-aipod": _SHARED,
        "e-aipod": _SHARED,
        "aipod": {"upper_lr": 0.1},
    },
    steps=200,
    every=5,
)
