"""Clients that lie, in the simulation: agreement in which some messages are not what they seem."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.sets import (
    AbstractAverage,
    AbstractSet,
    ClippedMean,
    Consensus,
    GeometricMedian,
    RobustConsensus,
    TrimmedMean,
)
from aipod.sets._agreement import AbstractAgreement, bytes_of_one_client

# How loud the attacks are.
_SCALE, _LOUD, _SPREADS = 10.0, 10.0, 1.5


def _flipped(own: Array, honest: Array, key: PRNGKeyArray) -> Array:
    return -own


def _scaled(own: Array, honest: Array, key: PRNGKeyArray) -> Array:
    return -_SCALE * own


def _noise(own: Array, honest: Array, key: PRNGKeyArray) -> Array:
    size = jnp.sqrt(jnp.mean(honest**2))
    return own + _LOUD * size * jax.random.normal(key, own.shape, own.dtype)


def _little(own: Array, honest: Array, key: PRNGKeyArray) -> Array:
    """As far from the honest mean as honest messages are (Baruch et al., NeurIPS 2019)."""
    mean, spread = jnp.mean(honest, axis=0), jnp.std(honest, axis=0)
    return jnp.broadcast_to(mean - _SPREADS * spread, own.shape)


# What liars send in place of their own messages, knowing the honest ones.
ATTACKS: dict[str, Callable[[Array, Array, PRNGKeyArray], Array]] = {
    "sign-flip": _flipped,
    "scaled": _scaled,
    "noise": _noise,
    "little": _little,
}


class Attacked(AbstractAgreement):
    """An agreement in which the first clients lie.

    **Arguments:**

    - `base`: the agreement that takes the messages.
    - `liars`: how many clients lie, the first ones.
    - `attack`: how, a name in `ATTACKS`.
    """

    base: AbstractSet
    liars: int = eqx.field(static=True)
    attack: str = eqx.field(static=True)
    key: PRNGKeyArray | None = None

    def _sent(self, tree: PyTree) -> PyTree:
        key = jax.random.key(0) if self.key is None else self.key

        def lied(leaf: Array) -> Array:
            if leaf.shape[0] <= self.liars:
                # One number that is a sum over all clients already.
                return leaf
            own, honest = leaf[: self.liars], leaf[self.liars :]
            return jnp.concatenate([ATTACKS[self.attack](own, honest, key), honest])

        return jax.tree.map(lied, tree) if self.liars else tree

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.project(self._sent(y))

    def tangent(self, v: PyTree) -> PyTree:
        return self.base.tangent(self._sent(v))

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, Consensus().project(y))

    def largest(self, values: Array) -> Array:
        return self.base.largest(self._sent(values))

    def summed(self, values: Array) -> Array:
        return self.base.summed(self._sent(values))

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return eqx.tree_at(lambda s: s.key, self, key, is_leaf=lambda leaf: leaf is None)

    def message_size(self, y: PyTree) -> int:
        return bytes_of_one_client(y)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        Consensus().check(y, name=name)


def defended(defence: str, share: float) -> AbstractSet:
    """The agreement of a defence, by its name; `share` is what the trimmed mean leaves out."""
    if defence == "none":
        return Consensus()
    averages: dict[str, Callable[[], AbstractAverage]] = {
        "trimmed-mean": lambda: TrimmedMean(share),
        "geometric-median": GeometricMedian,
        "clipped-mean": ClippedMean,
    }
    return RobustConsensus(averages[defence]())
