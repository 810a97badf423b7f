"""Additive gradient noise, as batches that are random linear functionals."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import hash32, subkeys
from aipod._misc.tree import to_device
from aipod.problem._samplers import AbstractSampler, Sampler, batch_size, expected


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
        total: Any = 0.0
        for i, leaf in enumerate(jax.tree.leaves((x, y))):
            total = total + jnp.sum(_normal(self.key, i, jnp.shape(leaf)) * leaf)
        return self.scale.astype(total.dtype) * total


def _normal(key: PRNGKeyArray, stream: int, shape: tuple[int, ...]) -> Array:
    """Independent normal numbers for each stream of one key, in single precision.

    The key comes from JAX's generator; the numbers under it come from counters hashed with it.
    JAX's own draw costs about 2 microseconds for 100 numbers on a CPU, the hash a tenth of that,
    and a step of a small noisy problem would otherwise spend most of its time drawing.
    """
    words = jax.random.key_data(key).ravel()
    count = math.prod(shape)
    index = jnp.arange(count, dtype=jnp.uint32)
    # The counter is 8 bits of the stream and 24 of the index. What does not fit in there chooses
    # another pair of words, so that no number comes twice.
    counters = (index & (2**24 - 1)) + jnp.uint32((stream % 256) << 24)
    block = jnp.uint32((stream >> 8) << 8)
    if count > 2**24:
        block = block + (index >> 24)
    first = words[0] + hash32(block * jnp.uint32(0x85EBCA6B))
    last = words[-1] + hash32(block * jnp.uint32(0xC2B2AE35))
    bits = hash32(hash32(counters * jnp.uint32(0x9E3779B9) + first) + last)
    # 23 random bits become a number in (-1, 1), symmetric about 0.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
    return (math.sqrt(2) * jax.lax.erf_inv(uniform)).reshape(shape)


def check_deviation(scale: Any) -> None:
    """Raises `ValueError` unless scale is one number, 0 or more."""
    is_number = isinstance(scale, float | int | np.number | np.ndarray | jax.Array)
    if isinstance(scale, bool) or not is_number or np.ndim(scale) or not 0 <= scale < math.inf:
        raise ValueError(f"scale must be 0 or more, a standard deviation, got {scale!r}.")


class Noise(AbstractSampler):
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
        check_deviation(scale)
        if samples is not None and not callable(samples):
            raise ValueError(
                f"samples must be a callable key -> batch, got {type(samples).__name__}."
            )
        self.scale = to_device(scale)
        self.samples = samples

    @property
    def size(self) -> int:
        return batch_size(self.samples)

    def __call__(self, key: PRNGKeyArray) -> LinearNoise:
        if self.samples is None:
            return LinearNoise(key, self.scale, None)
        noise_key, batch_key = subkeys(key, 2)
        return LinearNoise(noise_key, self.scale, self.samples(batch_key))

    def expected(self) -> LinearNoise:
        return LinearNoise(None, self.scale, expected(self.samples))
