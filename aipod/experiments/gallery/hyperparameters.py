"""Hyperparameters of regressions, chosen on validation data."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod.experiments.gallery.exhibit import Setting, as_floats
from aipod.experiments.gallery.samples import Table, diabetes, tumours
from aipod.problem import Bilevel, FullBatch, Minibatches

Batch = tuple[Array, Array]


def squares(y: Array, batch: Batch) -> Array:
    """Half the mean squared error of a linear model."""
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ y - targets) ** 2)


def log_loss(y: Array, batch: Batch) -> Array:
    """The mean logistic loss of a linear model, for targets of 1 and -1."""
    inputs, targets = batch
    return jnp.mean(jax.nn.softplus(-targets * (inputs @ y)))


def regression(training: int, *, unit: float = 1.0) -> tuple[Batch, Batch]:
    """The diabetes data: training examples and the rest; targets centred, divided by `unit`."""
    data = diabetes()
    centred = Table(data.inputs, (data.targets - data.targets.mean()) / unit)
    train, rest = centred.split(training, len(data.targets) - training)
    return as_floats(tuple(train)), as_floats(tuple(rest))


def ridge() -> Setting:
    """One log-penalty; targets in the units of the data, so that F is in the thousands."""
    train, validation = regression(60)
    problem = Bilevel(
        upper=lambda x, y, batch: squares(y, batch),
        lower=lambda x, y, batch: squares(y, batch) + 0.5 * jnp.exp(x) * jnp.sum(y**2),
        upper_samples=FullBatch(validation),
        lower_samples=FullBatch(train),
    )
    return Setting(problem, jnp.zeros(()), jnp.zeros(train[0].shape[1]))


def ridge_features() -> Setting:
    """A log-penalty for each feature, in batches of 32."""
    train, validation = regression(221, unit=77.0)

    def upper(x: Array, y: Array, batch: Batch) -> Array:
        # The best penalty of a useless feature is infinite; a weak prior makes it finite.
        return squares(y, batch) + 1e-4 * jnp.sum(x**2)

    problem = Bilevel(
        upper=upper,
        lower=lambda x, y, batch: squares(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        upper_samples=Minibatches(validation, 32),
        lower_samples=Minibatches(train, 32),
    )
    return Setting(problem, jnp.zeros(10), jnp.zeros(10))


def logistic() -> Setting:
    """A log-penalty for each of three groups of features and one for the constant; batches of 32.

    The groups are the mean, the spread and the worst value of ten measurements of a cell nucleus.
    """
    data = tumours().with_constant()
    signed = Table(data.inputs, 2.0 * data.targets - 1)
    train, validation = (as_floats(tuple(part)) for part in signed.split(150, 419))
    group = jnp.asarray(np.append(np.repeat(np.arange(3), 10), 3))

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        return log_loss(y, batch) + 0.5 * jnp.sum(jnp.exp(x)[group] * y**2)

    problem = Bilevel(
        upper=lambda x, y, batch: log_loss(y, batch) + 1e-4 * jnp.sum(x**2),
        lower=lower,
        upper_samples=Minibatches(validation, 32),
        lower_samples=Minibatches(train, 32),
    )
    return Setting(problem, jnp.zeros(4), jnp.zeros(31))


def elastic() -> Setting:
    """The two log-penalties of an elastic net; |y| is smoothed to sqrt(y^2 + 0.1^2).

    The features are the ten measurements and their products, 65 in all, for 120 patients.
    """
    train, validation = regression(120, unit=77.0)

    def products(batch: Batch) -> Batch:
        inputs, targets = batch
        first, second = np.triu_indices(inputs.shape[1])
        pairs = inputs[:, first] * inputs[:, second]
        return jnp.concatenate([inputs, pairs - jnp.mean(pairs, axis=0)[None]], axis=1), targets

    train, validation = products(train), products(validation)

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        penalty = jnp.exp(x[0]) * jnp.sum(jnp.sqrt(y**2 + 0.01))
        return squares(y, batch) + penalty + 0.5 * jnp.exp(x[1]) * jnp.sum(y**2)

    problem = Bilevel(
        upper=lambda x, y, batch: squares(y, batch) + 1e-4 * jnp.sum(x**2),
        lower=lower,
        upper_samples=FullBatch(validation),
        lower_samples=FullBatch(train),
    )
    return Setting(problem, jnp.full(2, jnp.log(0.01)), jnp.zeros(65))


def kernel() -> Setting:
    """The log-lengths of a Gaussian kernel in four features, and the log-variance of the noise.

    y are the dual coefficients of kernel ridge regression on 80 patients; x0 is the usual start,
    lengths of 1 and a noise of 0.1.
    """
    train, validation = regression(80, unit=77.0)
    # Age, body mass, blood pressure and a blood serum.
    used = np.array([0, 2, 3, 8])
    (points, targets), (others, truth) = (
        (inputs[:, used], values) for inputs, values in (train, validation)
    )

    def similar(x: Array, some: Array, others: Array) -> Array:
        gaps = (some[:, None, :] - others[None, :, :]) * jnp.exp(-x[:4])[None, None, :]
        return jnp.exp(-0.5 * jnp.sum(gaps**2, axis=-1))

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        inputs, values = batch
        quadratic = y @ similar(x, inputs, inputs) @ y + jnp.exp(x[4]) * jnp.sum(y**2)
        return 0.5 * quadratic - y @ values

    def upper(x: Array, y: Array, batch: Batch) -> Array:
        inputs, values = batch
        return 0.5 * jnp.mean((similar(x, inputs, points) @ y - values) ** 2) + 1e-4 * jnp.sum(x**2)

    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_samples=FullBatch((others, truth)),
        lower_samples=FullBatch((points, targets)),
    )
    x0 = jnp.asarray([0.0, 0.0, 0.0, 0.0, np.log(0.1)], float)
    return Setting(problem, x0, jnp.zeros(len(targets)))
