"""Features of a small network upstairs, and what is fitted on them downstairs."""

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from aipod.data import digits
from aipod.experiments.gallery.exhibit import Setting, as_floats
from aipod.problem import Bilevel, Composite, FullBatch, Minibatches

Parameters = dict[str, Array]
Batch = tuple[Array, Array]


def layer(seed: int, inputs: int, outputs: int) -> Parameters:
    """Random weights of the usual size, and biases of 0."""
    weights = np.random.default_rng(seed).normal(size=(inputs, outputs)) / np.sqrt(inputs)
    return as_floats({"weights": weights, "biases": np.zeros(outputs)})


def hidden(x: Parameters, inputs: Array) -> Array:
    """The hidden units and a constant."""
    units = jnp.tanh(inputs @ x["weights"] + x["biases"][None])
    return jnp.concatenate([units, jnp.ones((len(inputs), 1), units.dtype)], axis=1)


def decay(x: Parameters) -> Array:
    """The squares of all parameters."""
    return optax.tree.norm(x, squared=True)


def representation() -> Setting:
    """Eight features of the digits, and a ridge classifier on them; batches of 64.

    The classifier predicts 1 for its class and 0 for the others.
    """
    images, labels = digits().train
    (train, validation) = (
        as_floats((images[part], np.eye(10)[labels[part]]))
        for part in (slice(0, 400), slice(400, 800))
    )

    def features(x: Parameters, batch: Batch) -> Array:
        return hidden(x, batch[0])

    def error(units: Array, y: Array, batch: Batch) -> Array:
        return 0.5 * jnp.mean(jnp.sum((units @ y - batch[1]) ** 2, axis=1))

    def lower(units: Array, y: Array, batch: Batch) -> Array:
        return error(units, y, batch) + 0.005 * jnp.sum(y**2)

    def upper(x: Parameters, y: Array, batch: Batch) -> Array:
        return error(features(x, batch), y, batch) + 1e-4 * decay(x)

    problem = Bilevel(
        upper=upper,
        lower=Composite(features, lower),
        upper_samples=Minibatches(validation, 64),
        lower_samples=Minibatches(train, 64),
    )
    return Setting(problem, layer(0, 64, 8), jnp.zeros((9, 10)))


def sinusoids() -> Setting:
    """Meta-learning: features and a common head upstairs, the heads of 12 tasks downstairs.

    Each task is a sine of its own amplitude and phase with 10 points to learn from and 10 to be
    judged by. A task's head stays near the common one (implicit MAML: Rajeswaran et al., 2019).
    """
    rng = np.random.default_rng(0)
    height, phase = rng.uniform(0.5, 2.0, (12, 1)), rng.uniform(0, np.pi, (12, 1))
    places = rng.uniform(-3, 3, size=(12, 20))
    values = height * np.sin(places + phase)
    support, query = (
        as_floats((places[:, part], values[:, part])) for part in (slice(0, 10), slice(10, 20))
    )

    def error(x: Parameters, y: Array, batch: Batch) -> Array:
        places, values = batch
        units = hidden(x, places.reshape(-1, 1)).reshape(*places.shape, -1)
        return 0.5 * jnp.mean(jnp.sum((jnp.einsum("tpu,tu->tp", units, y) - values) ** 2, axis=1))

    def lower(x: Parameters, y: Array, batch: Batch) -> Array:
        return error(x, y, batch) + 0.5 * jnp.mean(jnp.sum((y - x["head"][None]) ** 2, axis=1))

    problem = Bilevel(
        upper=lambda x, y, batch: error(x, y, batch) + 1e-3 * decay(x),
        lower=lower,
        upper_samples=FullBatch(query),
        lower_samples=FullBatch(support),
    )
    x0 = layer(0, 1, 16) | as_floats({"head": np.zeros(17)})
    x0["biases"] = as_floats(np.random.default_rng(1).normal(size=16))
    return Setting(problem, x0, jnp.zeros((12, 17)))
