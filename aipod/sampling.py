"""Where batches come from: callables `key -> batch` that run on the device, inside the step.

Any callable of a key is a sampler. The ones here also know the batch that stands for the whole
distribution, `expected()`, which the exact reference values of `aipod.hypergradient` need.
"""

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._tree import all_finite

Sampler = Callable[[PRNGKeyArray], Any]


def draw(samples: Sampler | None, key: PRNGKeyArray) -> Any:
    """One batch; None when the objective needs none."""
    return None if samples is None else samples(key)


def batch_size(samples: Sampler | None) -> int:
    """How many examples one draw is; 1 for samplers that do not say."""
    return int(getattr(samples, "size", 1))


def expected(samples: Any) -> Any:
    """The batch whose objective is the expectation over the sampler."""
    if samples is None:
        return None
    if not hasattr(samples, "expected"):
        raise ValueError(
            "exact values need the expectation of the objective, and this sampler cannot give it: "
            "use aipod.FullBatch or aipod.Minibatches, or give your sampler a method expected() "
            "that returns the batch standing for all data."
        )
    return samples.expected()


def _length(data: PyTree, owner: str) -> int:
    leaves = jax.tree.leaves(data)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"{owner}: every array of data must have the examples on its leading axis, one length "
            f"for all; the shapes are {[jnp.shape(leaf) for leaf in leaves]}."
        )
    length = jnp.shape(leaves[0])[0]
    if length == 0:
        raise ValueError(f"{owner}: data holds no example.")
    return length


def _as_data(data: PyTree, owner: str) -> PyTree:
    data = jax.tree.map(jnp.asarray, data)
    if not all_finite(data):
        raise ValueError(f"{owner}: data holds NaN or infinity: remove or impute those examples.")
    return data


class FullBatch(eqx.Module):
    """Always the whole of `data`: a deterministic problem.

    !!! example
        ```python
        samples = aipod.FullBatch((inputs, targets))
        ```
    """

    data: PyTree

    def __init__(self, data: PyTree) -> None:
        self.data = _as_data(data, "FullBatch")

    @property
    def size(self) -> int:
        leaves = jax.tree.leaves(self.data)
        return max((jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)), default=1)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        return self.data

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The same sampler over function(data); `function` acts on each example."""
        return eqx.tree_at(lambda s: s.data, self, function(self.data))


class Minibatches(eqx.Module):
    """Batches of `batch_size` examples drawn uniformly from `data`.

    An objective that is a mean over the batch is then an unbiased estimate of the mean over
    `data`.

    **Arguments:**

    - `data`: a pytree of arrays with the examples on the leading axis.
    - `batch_size`: how many examples a batch holds.
    - `replace`: whether one batch may hold an example twice; without, a draw costs a
        permutation of the indices.

    !!! example
        ```python
        samples = aipod.Minibatches((inputs, targets), 256)
        ```
    """

    data: PyTree
    size: int = eqx.field(static=True)
    replace: bool = eqx.field(static=True)

    def __init__(self, data: PyTree, batch_size: int, *, replace: bool = True) -> None:
        self.data = _as_data(data, "Minibatches")
        self.size = int(batch_size)
        self.replace = replace
        length = _length(self.data, "Minibatches")
        if self.size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if not replace and self.size > length:
            raise ValueError(
                f"batch_size is {self.size}, but data holds {length} examples: draw with "
                "replace=True, or use aipod.FullBatch."
            )

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        length = jnp.shape(jax.tree.leaves(self.data)[0])[0]
        if self.replace:
            index = jax.random.randint(key, (self.size,), 0, length)
        else:
            index = jax.random.permutation(key, length)[: self.size]
        return jax.tree.map(lambda leaf: leaf[index], self.data)

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The same sampler over function(data); `function` acts on each example."""
        return eqx.tree_at(lambda s: s.data, self, function(self.data))


class LinearNoise(eqx.Module):
    """A random linear functional <xi_x, x> + <xi_y, y>; its gradient is Gaussian noise.

    xi is drawn when the functional meets x and y, from the key alone, so that the shapes need not
    be known beforehand and every evaluation of one functional sees the same xi.
    """

    key: PRNGKeyArray | None
    scale: Array
    batch: Any

    def __call__(self, x: PyTree, y: PyTree) -> Array:
        if self.key is None:
            return jnp.zeros(())
        keys = jax.random.split(self.key)
        noise = [
            optax.tree.random_like(k, tree, jax.random.normal)
            for k, tree in zip(keys, (x, y), strict=True)
        ]
        total = optax.tree.vdot(noise[0], x) + optax.tree.vdot(noise[1], y)
        return self.scale.astype(total.dtype) * total


class Noise(eqx.Module):
    """Batches that are random linear functionals: additive gradient noise of a standard deviation.

    The objective adds its batch, called on x and y; the expectation of the batch is zero.

    **Arguments:**

    - `scale`: the standard deviation of each entry of the gradient.
    - `samples`: a sampler whose batches come along as `batch.batch`.

    !!! example
        ```python
        problem = aipod.Bilevel(
            upper=lambda x, y, noise: jnp.sum((x - y) ** 2) + noise(x, y),
            lower=lambda x, y, noise: 0.5 * jnp.sum((y - 2 * x) ** 2) + noise(x, y),
            upper_samples=aipod.Noise(0.1),
            lower_samples=aipod.Noise(0.1),
        )
        ```
    """

    scale: Array
    samples: Sampler | None

    def __init__(self, scale: float, samples: Sampler | None = None) -> None:
        if not scale >= 0:
            raise ValueError(f"scale must be 0 or more, a standard deviation, got {scale}.")
        self.scale = jnp.asarray(scale, float)
        self.samples = samples

    @property
    def size(self) -> int:
        return batch_size(self.samples)

    def __call__(self, key: PRNGKeyArray) -> LinearNoise:
        if self.samples is None:
            return LinearNoise(key, self.scale, None)
        noise_key, batch_key = jax.random.split(key)
        return LinearNoise(noise_key, self.scale, self.samples(batch_key))

    def expected(self) -> LinearNoise:
        return LinearNoise(None, self.scale, expected(self.samples))
