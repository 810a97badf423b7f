"""Data hyper-cleaning: finds wrong training labels with the help of a few clean examples.

    min over x of   F(x) = mean over clean examples of  loss(y*(x))
    y*(x) = argmin of  mean over training examples i of  w_i loss_i(y) + ridge / 2 ||y||^2

Franceschi et al. (2017), the field's standard benchmark, as `benchmark_bilevel` (Dagréou et al.,
2022) has it, except for the model: here it is a softmax regression, so that the lower level is
strongly convex. Half of the training labels are replaced by wrong ones. The method is not told
which, and should give those examples small weights.

The weights w are sigmoid(x), and neither level is constrained; or x itself, within [0, 1]; or x on
a simplex, times the number of examples.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from aipod.data import load
from aipod.experiments.base import Experiment, Metric, Panel, Picture, Task, option, varied
from aipod.experiments.limits import POSITIVE, Limit, at_least, check_limits
from aipod.problem import Bilevel, Minibatches
from aipod.sets import AbstractSet, Box, Free, Simplex

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MIXED = Limit("be between 0 and 1", lambda value: 0 < value < 1)


@dataclasses.dataclass(frozen=True)
class Options:
    data: Literal["digits", "mnist"] = option("digits", "the images")
    data_dir: str | None = option(None, "folder with the files of mnist")
    corrupted: float = option(0.5, "share of training labels that are made wrong", _MIXED)
    training: int = option(20_000, "at most so many examples to clean", at_least(1))
    validation: int = option(200, "clean examples for the upper level", at_least(1))
    ridge: float = option(0.005, "the strongly convex term of the lower level", POSITIVE)
    batch_size: int = option(256, "examples in a minibatch, of either level", at_least(1))
    weights: Literal["sigmoid", "box", "simplex"] = option(
        "sigmoid", "sigmoid(x); or x within [0, 1]; or x on a simplex, times the examples"
    )
    problem_seed: int = option(0, "seed of the split and of the wrong labels", at_least(0))

    def __post_init__(self) -> None:
        check_limits(self)


class Examples(NamedTuple):
    """Inputs with a constant 1 at the end, and labels."""

    inputs: np.ndarray
    labels: np.ndarray


class Mixture(NamedTuple):
    """Training examples, some with wrong labels, and clean examples."""

    training: Examples
    truth: np.ndarray  # the right labels of the training examples
    validation: Examples
    test: Examples
    classes: int

    @property
    def wrong(self) -> np.ndarray:
        return self.training.labels != self.truth


def mixture(options: Options) -> Mixture:
    images, test, classes = load(options.data, options.data_dir)
    count = len(images.labels)
    if options.validation >= count:
        raise ValueError(
            f"validation is {options.validation}, but there are {count} examples: leave some to "
            "train on."
        )
    rng = np.random.default_rng(options.problem_seed)
    order = rng.permutation(count)
    held, used = np.split(order, [options.validation])
    used = used[: options.training]
    truth = images.labels[used]
    # Any other class, with equal probability.
    other = (truth + rng.integers(1, classes, size=len(used))) % classes
    labels = np.where(rng.uniform(size=len(used)) < options.corrupted, other, truth)
    if (labels == truth).all() or (labels != truth).all():
        raise ValueError(
            f"corrupted={options.corrupted} leaves only one kind of the {len(used)} training "
            "labels: take a share nearer to one half, or more examples."
        )
    return Mixture(
        Examples(_with_constant(images.images[used]), labels.astype(np.int32)),
        truth,
        Examples(_with_constant(images.images[held]), images.labels[held]),
        Examples(_with_constant(test.images), test.labels),
        classes,
    )


def _with_constant(images: np.ndarray) -> np.ndarray:
    return np.column_stack([images, np.ones(len(images), images.dtype)])


def losses(y: Array, inputs: Array, labels: Array) -> Array:
    """The cross-entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(inputs @ y, labels)


def accuracy(y: Array, inputs: Array, labels: Array) -> Array:
    return jnp.mean(jnp.argmax(inputs @ y, axis=1) == labels)


def area_under_curve(scores: Array, positive: Array) -> Array:
    """The probability that a positive example has the higher score; order breaks ties."""
    ranks = jnp.argsort(jnp.argsort(scores)) + 1
    positives, total = jnp.sum(positive), len(scores)
    above = jnp.sum(jnp.where(positive, ranks, 0)) - positives * (positives + 1) / 2
    return above / (positives * (total - positives))


class _Weighting(NamedTuple):
    """How x gives the weights: the set of x, the weights of its entries, and a start."""

    upper_set: AbstractSet
    weights: Callable[[Array], Array]
    start: float


def _weighting(kind: str, size: int) -> _Weighting:
    return {
        "sigmoid": _Weighting(Free(), jax.nn.sigmoid, 0.0),
        "box": _Weighting(Box(0.0, 1.0), lambda x: x, 0.5),
        "simplex": _Weighting(Simplex(), lambda x: size * x, 1 / size),
    }[kind]


def build(options: Options) -> Task:
    data = mixture(options)
    training, validation, test = (
        tuple(jnp.asarray(part, float if part.ndim == 2 else None) for part in examples)
        for examples in (data.training, data.validation, data.test)
    )
    size = len(data.truth)
    how = _weighting(options.weights, size)

    def upper(x: Array, y: Array, batch: tuple[Array, Array]) -> Array:
        return jnp.mean(losses(y, *batch))

    def lower(x: Array, y: Array, batch: tuple[Array, Array, Array]) -> Array:
        inputs, labels, index = batch
        weights = how.weights(x[index])
        return jnp.mean(weights * losses(y, inputs, labels)) + 0.5 * options.ridge * jnp.sum(y**2)

    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=how.upper_set,
        upper_samples=Minibatches(validation, options.batch_size),
        lower_samples=Minibatches((*training, jnp.arange(size)), options.batch_size),
    )
    right = jnp.asarray(~data.wrong)

    def record(x: Array, y: Array) -> dict[str, Array]:
        return {
            "accuracy": accuracy(y, *test),
            "auc": area_under_curve(x, right),
            "validation_loss": jnp.mean(losses(y, *validation)),
        }

    def draw(figure: "Figure", x: Array, y: Array) -> None:
        draw_weights(figure, data, np.asarray(how.weights(x)))

    x0, y0 = jnp.full(size, how.start), jnp.zeros((training[0].shape[1], data.classes))
    return Task(problem, x0, y0, record, picture=Picture(draw, _CAPTION, (9.6, 3.5)))


_CAPTION = (
    "Left: the weights of the training examples in the end; the method was not told which labels "
    "are wrong. Right: the examples that it trusts least and most, each with the label it came "
    "with (red: wrong)."
)


def draw_weights(figure: "Figure", data: Mixture, weights: np.ndarray) -> None:
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    left, right = halves
    place = left.subplots()
    kinds = ((~data.wrong, "right label", "#0072B2"), (data.wrong, "wrong label", "#D55E00"))
    for chosen, label, colour in kinds:
        top = max(1.0, float(weights.max()))
        place.hist(weights[chosen], 40, range=(0, top), color=colour, alpha=0.7, label=label)
    place.set(xlabel="weight", ylabel="training examples")
    place.legend(loc="upper center")
    order = np.argsort(weights)
    columns, pixels = 8, data.training.inputs.shape[1] - 1
    # The shape of the images is not known; take the rectangle that is closest to a square.
    height = max(d for d in range(1, math.isqrt(pixels) + 1) if pixels % d == 0)
    shown = (("least trusted", order[: 2 * columns]), ("most trusted", order[-2 * columns :][::-1]))
    rows: Any = right.subfigures(2, 1)
    for row, (title, chosen) in zip(rows, shown, strict=True):
        row.suptitle(title, fontsize=9, fontweight="bold")
        places = row.subplots(2, columns).ravel()
        for axes in places:
            axes.axis("off")
        for axes, index in zip(places, chosen, strict=False):  # there may be fewer examples
            image = data.training.inputs[index, :-1]
            axes.imshow(image.reshape(height, -1), cmap="gray_r")
            colour = "#D55E00" if data.wrong[index] else "#0072B2"
            axes.set_title(str(data.training.labels[index]), fontsize=9, color=colour, pad=1)


def panels(options: Options) -> tuple[Panel, ...]:
    return (Panel("Steps of the lower level", varied("aipod:lower_steps", (10, 5, 2))),)


_SHARED: dict[str, Any] = {"upper_optimizer": "adam(0.05)", "lower_steps": 10, "adjoint_steps": 20}

EXPERIMENT = Experiment(
    name="cleaning",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("auc", "AUC of found labels", log=False, better="larger"),
        Metric("accuracy", "test accuracy", log=False, better="larger"),
        Metric("validation_loss", "validation loss"),
    ),
    axes=("samples", "step"),
    arguments={"aipod": _SHARED},
    steps=2000,
    every=20,
)
