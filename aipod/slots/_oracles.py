"""Derivatives as a slot asks for them: plain, or by an estimator with a memory.

A slot carries the memory through its loop, `value, memory = oracle(point, key, memory)`, and hands
it back with its cost. Without an estimator the memory is None, and nothing is carried.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkey, word_of
from aipod.problem import (
    batch_size,
    clients_of,
    draw,
    expected,
    in_order,
    pieces_of,
    sizes_of,
)
from aipod.slots.estimators import AbstractEstimator, Oracle, or_plain
from aipod.stepsize import Rates

# (point, batch) -> derivative.
Raw = Callable[[PyTree, Any], PyTree]
Memories = dict[str, "Memory"]
# Apart from the keys of samples.
_COIN = 2**30


class Memory(eqx.Module):
    """What is kept for one derivative.

    - `count`: draws made so far, in a federation by each client.
    - `clock`: the same for all clients alike, whoever took part.
    - `extra`: examples looked at besides one batch in each draw; it may overflow, only differences
        are used.
    - `own`: what the estimator keeps.
    """

    count: Array
    clock: Array
    extra: Array
    own: PyTree


class Estimation(NamedTuple):
    """How the slot whose turn it is estimates derivatives.

    - `estimator`: its estimator; None for plain minibatches.
    - `memory`: one `Memory` for each derivative, by name; None where nothing is kept.
    - `words`: of the upper and of the lower level, choose the order of epochs.
    - `keys`: of the upper and of the lower level, where all slots share the draws of a step.
    """

    estimator: AbstractEstimator | None
    memory: Memories | None
    words: tuple[Array, Array]
    keys: tuple[PRNGKeyArray, PRNGKeyArray] | None


def first_memory(
    estimator: AbstractEstimator | None, samples: Any, like: PyTree, point: PyTree
) -> Memory:
    """The memory of a derivative before the first draw."""
    estimator = or_plain(estimator)
    pieces, by_client = pieces_of(samples), clients_of(samples)
    if pieces is None and estimator.finite:
        raise ValueError(
            f"{type(estimator).__name__} needs a finite sum, but {type(samples).__name__} draws "
            "batches without numbers: use aipod.Minibatches or aipod.federated.federate, or an "
            "estimator for streams, such as aipod.STORM()."
        )
    rows = (jax.tree.leaves(like)[0].shape[0],) if by_client else ()
    zero = jnp.zeros((), jnp.int32)
    own = estimator.init(like, point, pieces or 1, by_client)
    return Memory(jnp.zeros(rows, jnp.int32), zero, zero, own)


def ask(
    estimation: Estimation,
    rates: Rates,
    name: str,
    raw: Raw,
    point: PyTree,
    samples: Any,
    key: PRNGKeyArray,
    memory: Memories,
) -> tuple[PyTree, Memories]:
    """One derivative at a point, and the memories after it."""
    kept, estimator = memory[name], or_plain(estimation.estimator)
    upper = name in UPPER
    if samples is None or not (estimator.finite or in_order(samples)):
        number = None
        batch = draw(samples, key)

        def drawn(at: PyTree) -> PyTree:
            return raw(at, batch)
    else:
        number = samples.number(key, estimation.words[0 if upper else 1], kept.count)

        def drawn(at: PyTree) -> PyTree:
            return samples.on(number, lambda batch: raw(at, batch))

    def full(at: PyTree) -> PyTree:
        return raw(at, expected(samples))

    if number is None and estimator.finite:
        number = jnp.zeros((), jnp.int32)
    oracle = Oracle(
        drawn=drawn,
        full=full,
        number=number,
        pieces=pieces_of(samples),
        sizes=sizes_of(samples),
        before=kept.count,
        clock=kept.clock,
        key=subkey(key, _COIN),
        rates=rates,
    )
    found = estimator.estimate(oracle, point, kept.own)
    one = batch_size(samples)
    whole = one * (pieces_of(samples) or 0)
    extra = (jnp.asarray(found.batches, jnp.int32) - 1) * one
    extra = extra + jnp.asarray(found.passes, jnp.int32) * whole
    new = Memory(kept.count + 1, kept.clock + 1, kept.extra + extra, found.memory)
    return found.value, memory | {name: new}


# Names of derivatives, and the level whose samples they need.
UPPER = ("slope", "direct")
LOWER = ("gradient", "product", "implicit")


def spent(before: Any, after: Any, *, shared: bool) -> tuple[Array | int, Array | int]:
    """The examples of the upper and of the lower level that were looked at besides the draws.

    Where draws are `shared`, both gradients of f are of the same examples and count once.
    """
    if before is None:
        return 0, 0

    def of(names: tuple[str, ...]) -> Array | int:
        total: Array | int = 0
        for old, new in zip(before, after, strict=True):
            total = total + sum(new[n].extra - old[n].extra for n in names if n in new)
        return total

    return of(("direct",) if shared else UPPER), of(LOWER)


def words_of(key: PRNGKeyArray) -> tuple[Array, Array]:
    """The words behind the order of epochs, from the key of a run, for both levels."""
    return word_of(subkey(key, _COIN)), word_of(subkey(key, _COIN + 1))
