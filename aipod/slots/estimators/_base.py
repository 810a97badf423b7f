"""What every estimator answers."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import is_concrete
from aipod.stepsize import Curvature, Rates, StepSize, check_lr


class Oracle(NamedTuple):
    """What an estimator may ask in one draw.

    - `drawn`: point -> the derivative there on the batch that was drawn.
    - `full`: point -> the derivative there on all data.
    - `number`: which fixed minibatch was drawn, one number for each client of a federation; None
        where the sampler knows none.
    - `pieces`: how many fixed minibatches there are, the most that a client has; None where that
        is not known.
    - `sizes`: the same for each client, where they differ.
    - `before`: how many draws were made before, by each client.
    - `clock`: how many outer calls there were before, the same for all clients.
    - `key`: for coins, which all clients toss alike.
    - `rates`: evaluates weights that are schedules of the outer step.

    !!! example
        ```python
        def newest(oracle: aipod.Oracle, point, memory):
            return aipod.Estimate(oracle.drawn(point), memory)
        ```
    """

    drawn: Callable[[PyTree], PyTree]
    full: Callable[[PyTree], PyTree]
    number: Array | None
    pieces: int | None
    sizes: Array | int | None
    before: Array
    clock: Array
    key: PRNGKeyArray
    rates: Rates

    @property
    def first(self) -> Array:
        """Whether some client draws for the first time."""
        return jnp.any(self.before == 0)


class Estimate(NamedTuple):
    """What an estimator answers.

    - `value`: the estimate.
    - `memory`: what it keeps.
    - `batches`: derivatives on the drawn batch that it asked for.
    - `passes`: derivatives on all data that it asked for.

    !!! example
        ```python
        found = aipod.Estimate(value=jnp.zeros(3), memory=None, batches=2)
        ```
    """

    value: PyTree
    memory: PyTree
    batches: Array | int = 1
    passes: Array | int = 0


class AbstractEstimator(eqx.Module):
    """Estimates a derivative from minibatches, with a memory.

    A point is a tuple of what the derivative depends on, such as (x, y). In a federation every
    leaf of points, derivatives and memory has a row for each client.

    A subclass must answer `init` and `estimate`, and `finite` with True when it needs a finite sum:
    fixed minibatches with numbers, or passes over all data.

    !!! example
        ```python
        class Newest(aipod.AbstractEstimator):
            def init(self, like, point, pieces, by_client):
                return None

            def estimate(self, oracle, point, memory):
                return aipod.Estimate(oracle.drawn(point), memory)


        solver = aipod.E3AiPOD(estimator=Newest())
        ```
    """

    @abc.abstractmethod
    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        """The memory before the first draw, for derivatives like `like`.

        Only shapes and types may be read from `like` and `point`.
        """

    @abc.abstractmethod
    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        """The estimate at a point, and the memory after it."""

    @property
    def finite(self) -> bool:
        """Whether it needs a finite sum."""
        return False


class Plain(AbstractEstimator):
    """The derivative on the drawn batch, without memory."""

    def init(self, like: PyTree, point: PyTree, pieces: int, by_client: bool) -> PyTree:
        return None

    def estimate(self, oracle: Oracle, point: PyTree, memory: PyTree) -> Estimate:
        return Estimate(oracle.drawn(point), memory)


def check_weight(value: StepSize, name: str) -> None:
    """Raises `ValueError` unless value is a number in (0, 1], or a schedule of them."""
    check_lr(value, name)
    number = not callable(value) and is_concrete(value)
    if isinstance(value, Curvature) or (number and float(np.asarray(value)) > 1):
        raise ValueError(
            f"{name} must be a number in (0, 1] or an Optax schedule, got {value}: 1 forgets "
            "everything in every draw."
        )


def beside(flag: Array, leaf: Array) -> Array:
    """A flag, or one for each client, in a shape that goes with a leaf."""
    return flag.reshape(flag.shape + (1,) * (leaf.ndim - flag.ndim))


def chosen(flag: Array, yes: PyTree, no: PyTree) -> Any:
    """`yes` where the flag holds, or where it holds for a client; else `no`."""
    return jax.tree.map(lambda a, b: jnp.where(beside(flag, a), a, b), yes, no)


def drift(new: PyTree, old: PyTree, base: PyTree) -> PyTree:
    """base + new - old."""
    return optax.tree.add(base, optax.tree.sub(new, old))
