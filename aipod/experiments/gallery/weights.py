"""Weights of training examples, and examples made to mislead."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from aipod.data import digits
from aipod.experiments.gallery.exhibit import Setting, as_floats
from aipod.experiments.gallery.hyperparameters import log_loss, squares
from aipod.experiments.gallery.samples import Table, tumours, wines
from aipod.experiments.tasks import cleaning
from aipod.problem import Bilevel, FullBatch, Minibatches
from aipod.sets import Affine, Budget

Batch = tuple[Array, Array]


def cleaned_digits() -> Setting:
    """`tasks/cleaning.py` with 300 digits to clean, 200 clean ones, and batches of 64."""
    task = cleaning.build(cleaning.Options(training=300, batch_size=64))
    plain = task.problem.upper

    def upper(x: Array, y: Array, batch: Batch) -> Array:
        # The best log-odds of a label are infinite; a weak prior makes them finite.
        return plain(x, y, batch) + 1e-3 * jnp.mean(x**2)

    problem = dataclasses.replace(task.problem, upper=upper)
    return Setting(problem, task.x0, task.y0)


def shifted_tumours() -> Setting:
    """Weights of 300 training examples, started at 1/300, that add up to 1; batches of 32.

    The training tumours are mostly small, the validation tumours mostly large. The prior is the
    chi-squared distance from equal weights, strong enough to keep the best weights positive.
    """
    data = tumours()
    signed = Table(data.inputs, 2.0 * data.targets - 1).with_constant()
    by_size = np.argsort(data.inputs[:, 0] + np.random.default_rng(0).normal(size=569))
    train, validation = (
        as_floats((signed.inputs[part], signed.targets[part]))
        for part in (by_size[:300], by_size[300:])
    )
    count = 300

    def lower(x: Array, y: Array, batch: tuple[Array, Array, Array]) -> Array:
        inputs, targets, index = batch
        errors = 0.5 * (inputs @ y - targets) ** 2
        return jnp.mean(count * x[index] * errors) + 0.25 * jnp.sum(y**2)

    def upper(x: Array, y: Array, batch: Batch) -> Array:
        return squares(y, batch) + 0.6 * count * jnp.sum((x - 1 / count) ** 2)

    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=Budget(1.0),
        upper_samples=Minibatches(validation, 32),
        lower_samples=Minibatches((*train, jnp.arange(count)), 32),
    )
    return Setting(problem, jnp.full(count, 1 / count), jnp.zeros(31))


def class_weights() -> Setting:
    """Log-weights and logit shifts of three classes of wine; each must add up to 0.

    The training data have few wines of the last grower, the validation data count all growers
    equally. Batches of 16.
    """
    data = wines().with_constant()
    rare = np.cumsum(data.targets == 2) <= 4
    first = np.arange(178) < 90
    training = first & ((data.targets != 2) | rare)
    counts = np.bincount(data.targets[~first], minlength=3)
    balance = jnp.asarray((~first).sum() / (3 * counts), float)
    train, validation = (
        (jnp.asarray(data.inputs[part], float), jnp.asarray(data.targets[part]))
        for part in (training, ~first)
    )

    def losses(logits: Array, labels: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        inputs, labels = batch
        shifted = losses(inputs @ y + x[3:][None], labels)
        return jnp.mean(jnp.exp(x[:3])[labels] * shifted) + 0.01 * jnp.sum(y**2)

    def upper(x: Array, y: Array, batch: Batch) -> Array:
        inputs, labels = batch
        return jnp.mean(balance[labels] * losses(inputs @ y, labels)) + 1e-3 * jnp.sum(x**2)

    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=Affine(np.kron(np.eye(2), np.ones((1, 3)))),
        upper_samples=Minibatches(validation, 16),
        lower_samples=Minibatches(train, 16),
    )
    return Setting(problem, jnp.zeros(6), jnp.zeros((14, 3)))


def poisoned_digits() -> Setting:
    """What an attacker adds to 20 of 100 training images to spoil a classifier of 3 and 8.

    x are changes of pixels in [0, 1]; the attacker pays for their squares.
    """
    images, labels = digits().train
    pair = np.flatnonzero((labels == 3) | (labels == 8))[:220]
    inputs, signs = as_floats((images[pair], np.where(labels[pair] == 3, 1.0, -1.0)))

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        images, signs = batch
        return log_loss(y, (images.at[:20].add(x), signs)) + 0.01 * jnp.sum(y**2)

    problem = Bilevel(
        upper=lambda x, y, batch: 0.001 * jnp.sum(x**2) - log_loss(y, batch),
        lower=lower,
        upper_samples=FullBatch((inputs[100:], signs[100:])),
        lower_samples=FullBatch((inputs[:100], signs[:100])),
    )
    return Setting(problem, jnp.zeros((20, 64)), jnp.zeros(64))
