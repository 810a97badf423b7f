"""Batches whose examples are spread over several devices."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.problem._pieces import in_order, pieces_of
from aipod.problem._samplers import (
    AbstractSampler,
    Sampler,
    batch_size,
    expected,
    is_random,
    precomputed,
)


class _SpreadBatches(AbstractSampler):
    """The batches of another sampler, with their leading axis spread over a mesh."""

    samples: Any
    sharding: NamedSharding = eqx.field(static=True)

    @property
    def size(self) -> int:
        return batch_size(self.samples)

    @property
    def random(self) -> bool:
        return is_random(self.samples)

    @property
    def pieces(self) -> int | None:
        """As the sampler that is spread."""
        return pieces_of(self.samples)

    @property
    def epochs(self) -> bool:
        """As the sampler that is spread."""
        return in_order(self.samples)

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """As the sampler that is spread."""
        found: Array = self.samples.number(key, word, count)
        return found

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function of a fixed minibatch that is spread."""
        return self.samples.on(number, lambda batch: function(self._spread(batch)))

    def _spread(self, batch: PyTree) -> PyTree:
        devices = self.sharding.mesh.size

        def one(leaf: Any) -> Any:
            # Examples that do not divide evenly, and what is no example, stay where they are.
            if not eqx.is_array(leaf) or leaf.ndim == 0 or leaf.shape[0] % devices:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.sharding)

        return jax.tree.map(one, batch)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        return self._spread(self.samples(key))

    def expected(self) -> PyTree:
        return self._spread(expected(self.samples))

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> Any:
        found = precomputed(self.samples, function, draws)
        return None if found is None else _SpreadBatches(found, self.sharding)


def spread_batches(samples: Sampler | None, sharding: NamedSharding) -> Sampler | None:
    """A sampler whose batches are spread as the sharding says."""
    return None if samples is None else _SpreadBatches(samples, sharding)
