"""Where batches come from: callables `key -> batch` that run on the device, inside the step.

Any callable of a key is a sampler. The ones here also know the batch that stands for the whole
distribution, `expected()`, which the exact reference values of `aipod.hypergradient` need.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.keys import hash32, subkeys
from aipod._misc.tree import all_finite, to_device

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


def _whole(batch_size: Any) -> int:
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number, at least 1, got {batch_size!r}.")
    return int(batch_size)


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
        if any(jnp.size(leaf) == 0 for leaf in jax.tree.leaves(self.data)):
            raise ValueError("FullBatch: data holds no example.")

    @property
    def size(self) -> int:
        leaves = jax.tree.leaves(self.data)
        return max((jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)), default=1)

    @property
    def pool(self) -> int:
        """How many examples there are to draw from."""
        return self.size

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        return self.data

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
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
        self.size = _whole(batch_size)
        self.replace = replace
        length = _length(self.data, "Minibatches")
        if not replace and self.size > length:
            raise ValueError(
                f"batch_size is {self.size}, but data holds {length} examples: draw with "
                "replace=True, or use aipod.FullBatch."
            )

    @property
    def pool(self) -> int:
        """How many examples there are to draw from."""
        return int(jnp.shape(jax.tree.leaves(self.data)[0])[0])

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.replace:
            index = jax.random.randint(key, (self.size,), 0, self.pool)
        else:
            index = jax.random.permutation(key, self.pool)[: self.size]
        return jax.tree.map(lambda leaf: leaf[index], self.data)

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
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
    counters = jnp.arange(count, dtype=jnp.uint32) + jnp.uint32((stream << 24) % 2**32)
    bits = hash32(hash32(counters * jnp.uint32(0x9E3779B9) + words[0]) + words[-1])
    # 23 random bits become a number in (-1, 1), symmetric about 0.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
    return (math.sqrt(2) * jax.lax.erf_inv(uniform)).reshape(shape)


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
        if not 0 <= scale < float("inf"):
            raise ValueError(f"scale must be 0 or more, a standard deviation, got {scale}.")
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


class ClientBatch(eqx.Module):
    """One batch for each client, on the leading axis of `data`.

    `weights`, where given, says how much each example counts in its client's loss; a client with
    fewer examples than the axis is long has zeros at the end. Without, all count alike.
    """

    data: PyTree
    weights: Array | None = None


class ClientMinibatches(eqx.Module):
    """Batches of `batch_size` examples of each client, drawn uniformly with replacement.

    **Arguments:**

    - `data`: a pytree of arrays with axes (client, example, ...).
    - `batch_size`: examples of each client in a batch; None for all of them, every time.
    - `counts`: how many examples each client has, where some have fewer than the axis is long.

    !!! example
        ```python
        samples = aipod.ClientMinibatches((inputs, labels), 64)  # inputs: (clients, examples, d)
        ```
    """

    batch: PyTree
    counts: Array | None
    clients: int = eqx.field(static=True)
    pool: int = eqx.field(static=True)
    per_client: int | None = eqx.field(static=True)

    def __init__(
        self, data: PyTree, batch_size: int | None, *, counts: ArrayLike | None = None
    ) -> None:
        data = _as_data(data, "ClientMinibatches")
        self.clients = _length(data, "ClientMinibatches")
        shapes = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(data)}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(
                "ClientMinibatches: every array of data must have the axes (client, example, ...), "
                f"the first two alike; the shapes are {sorted(shapes)}."
            )
        self.pool = next(iter(shapes))[1]
        self.per_client = None if batch_size is None else _whole(batch_size)
        self.counts = None
        if counts is not None:
            given = np.asarray(counts)
            if given.shape != (self.clients,) or given.min() < 1 or given.max() > self.pool:
                raise ValueError(
                    f"counts must give each of the {self.clients} clients at least 1 and at most "
                    f"{self.pool} examples: leave out clients that have none."
                )
            if given.min() < self.pool:
                self.counts = jnp.asarray(given, jnp.int32)
        whole = ClientBatch(data)
        self.batch = _weighted(whole, self.counts) if batch_size is None else whole

    @property
    def size(self) -> int:
        """Examples in one draw, of all clients together."""
        return self.clients * (self.pool if self.per_client is None else self.per_client)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.per_client is None:
            return self.expected()
        shape = (self.clients, self.per_client)
        if self.counts is None:
            index = jax.random.randint(key, shape, 0, self.pool)
        else:
            index = jax.random.randint(key, shape, 0, self.counts[:, None])
        return jax.tree.map(
            lambda leaf: jax.vmap(jnp.take, (0, 0, None))(leaf, index, 0), self.batch
        )

    def expected(self) -> PyTree:
        return self.batch if self.per_client is None else _weighted(self.batch, self.counts)

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
        return eqx.tree_at(lambda s: s.batch, self, function(self.batch))


def _weighted(batch: ClientBatch, counts: Array | None) -> ClientBatch:
    """The batch of all data, with what the padding counts: nothing."""
    if counts is None:
        return batch
    pool = jax.tree.leaves(batch.data)[0].shape[1]
    present = jnp.arange(pool)[None, :] < counts[:, None]
    share = 1 / counts.astype(jnp.result_type(float))
    return ClientBatch(batch.data, present * share[:, None])
