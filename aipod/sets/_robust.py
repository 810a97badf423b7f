"""Agreement between clients some of whom may lie: averages that few of them cannot move far."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from aipod.sets._agreement import AbstractAgreement, bytes_of_one_client
from aipod.sets._consensus import Consensus


class AbstractAverage(eqx.Module):
    """How messages of clients become one: (vectors of all clients, their shares) -> a vector."""

    @abc.abstractmethod
    def __call__(
        self, messages: Float[Array, "clients size"], shares: Float[Array, " clients"]
    ) -> Float[Array, " size"]:
        """The average. The shares are positive and add up to 1."""

    @property
    @abc.abstractmethod
    def tolerance(self) -> float:
        """The share of clients that may lie: of the largest numbers so many are not believed."""

    def largest(self, values: Array) -> Array:
        """The largest of one number per client, without the share that may lie."""
        ordered = jnp.sort(values)
        return ordered[len(values) - 1 - int(self.tolerance * len(values))]

    def total(self, values: Array) -> Array:
        """The sum of one number per client, as if the others said what the middle ones say."""
        ordered = jnp.sort(values)
        cut = int(self.tolerance * len(values))
        return len(values) * jnp.mean(ordered[cut : len(values) - cut])


class TrimmedMean(AbstractAverage):
    """The mean of each entry without its largest and its smallest values (Yin et al., ICML 2018).

    Where fewer than `share` of the clients lie, every entry of the result lies between honest
    values, and its error is of the order of how much honest clients differ.

    **Arguments:**

    - `share`: how much is left out at either end, in [0, 0.5).

    !!! example
        ```python
        average = aipod.sets.TrimmedMean(0.2)
        ```
    """

    share: float = eqx.field(static=True, default=0.2)

    def __check_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ValueError(f"TrimmedMean: share must be in [0, 0.5), got {self.share}.")

    @property
    def tolerance(self) -> float:
        return self.share

    def __call__(self, messages: Array, shares: Array) -> Array:
        order = jnp.argsort(messages, axis=0)
        ends = jnp.cumsum(shares[order], axis=0)
        begins = ends - shares[order]
        # How much of each value's share lies between the two ends that are left out.
        inside = jnp.clip(ends, self.share, 1 - self.share)
        inside = inside - jnp.clip(begins, self.share, 1 - self.share)
        values = jnp.take_along_axis(messages, order, axis=0)
        kept = inside.astype(messages.dtype)
        # A value that is not counted may be infinite.
        return jnp.sum(jnp.where(kept > 0, kept * values, 0), axis=0) / jnp.sum(kept, axis=0)


class GeometricMedian(AbstractAverage):
    """The point with the least sum of distances to all messages (Pillutla et al., TSP 2022).

    By Weiszfeld's iteration. Where less than half of the clients lie, it stays within a few times
    the distance between honest messages.

    **Arguments:**

    - `iterations`: of Weiszfeld's algorithm.

    !!! example
        ```python
        average = aipod.sets.GeometricMedian()
        ```
    """

    iterations: int = eqx.field(static=True, default=12)

    def __check_init__(self) -> None:
        if not self.iterations >= 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")

    @property
    def tolerance(self) -> float:
        return 0.49

    def __call__(self, messages: Array, shares: Array) -> Array:
        def closer(point: Array, _: Any) -> tuple[Array, None]:
            distance = jnp.linalg.norm(messages - point[None], axis=1)
            # A message at the point itself pulls with all of its share and no more.
            least = 1e-6 * jnp.median(distance) + jnp.finfo(messages.dtype).tiny
            pull = shares.astype(messages.dtype) / jnp.maximum(distance, least)
            return (pull / jnp.sum(pull)) @ messages, None

        return jax.lax.scan(closer, jnp.median(messages, axis=0), length=self.iterations)[0]


class ClippedMean(AbstractAverage):
    """The mean of messages that are cut to a radius around the middle (Karimireddy et al. 2021).

    The middle is the median of each entry at first and the result of the iteration before later;
    the radius is `factor` times the median distance from it. A client moves the result by no more
    than its share times the radius.

    **Arguments:**

    - `factor`: the radius, in median distances.
    - `iterations`: how often the middle is found anew.

    !!! example
        ```python
        average = aipod.sets.ClippedMean(factor=1.0)
        ```
    """

    factor: float = eqx.field(static=True, default=1.0)
    iterations: int = eqx.field(static=True, default=3)

    def __check_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"factor must be positive, got {self.factor}.")
        if not self.iterations >= 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")

    @property
    def tolerance(self) -> float:
        return 0.49

    def __call__(self, messages: Array, shares: Array) -> Array:
        weights = shares.astype(messages.dtype)

        def again(middle: Array, _: Any) -> tuple[Array, None]:
            moves = messages - middle[None]
            distance = jnp.linalg.norm(moves, axis=1)
            radius = self.factor * jnp.median(distance)
            cut = jnp.minimum(1.0, radius / jnp.where(distance > 0, distance, 1.0))
            return middle + (weights * cut) @ moves, None

        return jax.lax.scan(again, jnp.median(messages, axis=0), length=self.iterations)[0]


class RobustConsensus(AbstractAgreement):
    """All clients agree, on a robust average of what they send in place of the mean.

    The average is not linear, so this is no projection, and corrections of the clients no longer
    add up to zero. A client therefore sends its point *without* its correction, which is about
    y - beta S grad g_m(y). Fixed points are where the robust average of the clients' gradients is
    zero, and not where their mean is: for clients that differ they are off the solution by about
    how much their gradients differ, also when nobody lies. Clients that are all alike lose nothing.

    All clients count alike and take part in every round. The largest of the clients' numbers (the
    curvature) is taken without the share that may lie.

    **Arguments:**

    - `average`: `TrimmedMean`, `GeometricMedian` or `ClippedMean`.

    !!! example
        ```python
        agreement = aipod.sets.RobustConsensus(aipod.sets.TrimmedMean(0.25))
        agreement.project(jnp.array([[1.0], [2.0], [3.0], [1e9]]))  # all 2.5
        robust = dataclasses.replace(problem, upper_set=agreement, lower_set=agreement)
        ```
    """

    average: AbstractAverage = TrimmedMean()

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        Consensus().check(y, name="this set")
        flat = jax.vmap(lambda one: ravel_pytree(one)[0])(y)
        clients = flat.shape[0]
        found = self.average(flat, jnp.full(clients, 1 / clients, flat.dtype))
        one = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], y))[1](found)
        return jax.tree.map(lambda a, b: jnp.broadcast_to(a, b.shape).astype(b.dtype), one, y)

    def tangent(self, v: PyTree) -> PyTree:
        return self.project(v)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(y, self.project(y))

    @property
    def everyone(self) -> bool:
        return True

    def largest(self, values: Array) -> Array:
        return self.average.largest(values)

    def summed(self, values: Array) -> Array:
        return self.average.total(values)

    def message_size(self, y: PyTree) -> int:
        return bytes_of_one_client(y)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        Consensus().check(y, name=name)
