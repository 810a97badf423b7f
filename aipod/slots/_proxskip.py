"""ProxSkip: SGD that projects with probability p and corrects for the projections it skipped.

The lower level (`update-z`, `update-yz1`, `update-yz2`) and the adjoint of E2-AiPOD
(`update-hatlambda-WS`, `update-lz1-WS`, `update-lz2-WS`) are this one loop, with other gradients
and other projections.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import coins, round_keys, subkeys
from aipod._misc.loops import is_large, started_by_host
from aipod._misc.tree import axpy, inner
from aipod.sets import AbstractSet
from aipod.slots._settling import Met, land, settle
from aipod.stepsize import one_of

Gradient = Callable[[PyTree, PRNGKeyArray], PyTree]
# The same with the memory of an estimator, which goes in and comes out; None without one.
Oracle = Callable[[PyTree, PRNGKeyArray, Any], tuple[PyTree, Any]]


class Skipped(NamedTuple):
    """What `proxskip` returns.

    - `point`, `correction`: the last iterate and correction.
    - `projections`: how often it projected.
    - `products`: for each iteration i from the second on <d_{i-1}, d_i>, d_i = gradient - r. The
        samples behind two iterations are independent, so these are free of their noise.
    - `met`: on a set with bounds what its projections met; else None.
    - `memory`: the oracle's, after the last iteration.
    - `landed`: where the last projection led, of one client where all have the same; None where
        nobody asked.
    """

    point: PyTree
    correction: PyTree
    projections: Array
    products: Array
    met: Met | None = None
    memory: Any = None
    landed: PyTree = None


def proxskip(
    gradient: Gradient,
    constraint: AbstractSet,
    start: PyTree,
    correction: PyTree,
    *,
    lr: Array,
    probability: float | Array,
    steps: int,
    key: PRNGKeyArray,
    last: bool = False,
) -> tuple[PyTree, PyTree, Array]:
    """`watched_proxskip` without its products, which are then not computed."""
    return watched_proxskip(
        lambda point, key, memory: (gradient(point, key), memory),
        constraint,
        start,
        correction,
        lr=lr,
        probability=probability,
        steps=steps,
        key=key,
        watched=False,
        last=last,
    )[:3]


def watched_proxskip(
    gradient: Oracle,
    constraint: AbstractSet,
    start: PyTree,
    correction: PyTree,
    *,
    lr: Array,
    probability: float | Array,
    steps: int,
    key: PRNGKeyArray,
    watched: bool = True,
    last: bool = False,
    memory: Any = None,
    met: Met | None = None,
    landed: PyTree = None,
    far: Callable[[PyTree], Array] | None = None,
) -> Skipped:
    """Runs `steps` iterations.

    `constraint` is a set with x fixed.

    v_hat = v - lr (gradient(v) - r)
    with probability p:   v <- project(v_hat - (lr / p) r),   r <- r + (p / lr) (v - v_hat)
    otherwise:            v <- v_hat

    With `last` the last iteration always projects, and with `far` where that says so of v_hat.
    `met`, on a set with bounds: what was met before, with multipliers of 0. `landed`: where the
    last projection before this led, for those who want to know of the next.
    """
    coin_key, keys = step_keys(key, steps)
    tosses = coins(coin_key, probability, steps)
    if last:
        tosses = tosses.at[-1].set(True)

    def body(carry: tuple[PyTree, ...], inputs: tuple[Array, Array, Any, Any]) -> tuple[Any, Any]:
        point, residual, before, met, memory, landed = carry
        coin, ends, draw_key, round_key = inputs
        slope, memory = gradient(point, draw_key, memory)
        whole = residual if met is None else met.whole(residual)
        ahead = local_step(slope, point, whole, lr)
        if far is not None:
            coin = coin | jax.lax.cond(ends, far, lambda _: jnp.asarray(False), ahead)
        seen = product = None
        if watched:
            seen = optax.tree.sub(slope, whole)
            product = inner(before, seen, per_client=constraint.per_client)

        def projected() -> tuple[PyTree, ...]:
            if met is not None:
                return land(
                    constraint,
                    ahead,
                    residual,
                    met,
                    lr=lr,
                    probability=probability,
                    key=round_key,
                )[:3]
            new, corrected, _ = settle(
                constraint,
                ahead,
                residual,
                lr=lr,
                probability=probability,
                key=round_key,
            )
            return new, corrected, met

        def skipped() -> tuple[PyTree, ...]:
            return ahead, residual, met

        # One scalar coin outside vmap: a skipped projection is not computed.
        new, corrected, pushed = jax.lax.cond(coin, projected, skipped)
        if landed is not None:
            kept = one_of(constraint, new)
            landed = jax.tree.map(lambda a, b: jnp.where(coin, a, b), kept, landed)
        return (new, corrected, seen, pushed, memory, landed), (product, coin)

    inputs = (tosses, jnp.arange(steps) == steps - 1, keys, round_keys(key, steps))
    nothing = optax.tree.zeros_like(start) if watched else None
    first = (start, correction, nothing, met, memory, landed)
    carry, (products, made) = jax.lax.scan(body, first, inputs)
    return Skipped(carry[0], carry[1], jnp.sum(made), products, *carry[3:])


def local_steps(
    gradient: Oracle,
    start: PyTree,
    correction: PyTree,
    *,
    lr: Array,
    steps: int,
    key: PRNGKeyArray,
    memory: Any = None,
) -> tuple[PyTree, PyTree, Any]:
    """`steps` iterations that all skip the projection; `settle` projects afterwards.

    Returns the iterate half way, after steps // 2 of them, the last one, and the oracle's memory.
    """
    keys, count = step_keys(key, steps)[1], steps // 2
    # On a GPU, where arrays are large: no copies, for a program that is longer.
    apart = started_by_host() and is_large(start)

    def one(carry: tuple[PyTree, Any], draw_key: PRNGKeyArray) -> tuple[Any, None]:
        point, memory = carry
        slope, memory = gradient(point, draw_key, memory)
        return (local_step(slope, point, correction, lr), memory), None

    def half(carry: tuple[Any, PyTree], draw_keys: PRNGKeyArray) -> tuple[Any, None]:
        here = there = carry[0]
        if apart and count:
            # The first step outside the loop, which would begin with a copy of where it starts.
            there, draw_keys = one(here, draw_keys[0])[0], draw_keys[1:]
        there, _ = jax.lax.scan(one, there, draw_keys)
        return (there, here[0]), None

    # One loop of the compiled program serves both halves; it carries along where the second began.
    halves, both = keys[: 2 * count].reshape(2, count), 2 if apart else 1
    (last, middle), _ = jax.lax.scan(half, ((start, memory), start), halves, unroll=both)
    if steps % 2:
        last, _ = one(last, keys[-1])
    return middle, *last


def local_step(slope: PyTree, point: PyTree, correction: PyTree, lr: Array) -> PyTree:
    """v_hat = v - lr (slope - r)."""
    return axpy(point, -lr, optax.tree.sub(slope, correction))


def step_keys(key: PRNGKeyArray, steps: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """A key for the coins of a loop, and one for the sample of each of its steps.

    Projected SGD splits its key here too, so that ProxSkip with p = 1 sees the same samples.
    """
    keys = subkeys(key, steps + 1)
    return keys[0], keys[1:]
