"""ProxSkip: SGD that projects with probability p and corrects for the projections it skipped.

The lower level (`update-z`, `update-yz1`, `update-yz2`) and the adjoint of E2-AiPOD
(`update-hatlambda-WS`, `update-lz1-WS`, `update-lz2-WS`) are this one loop, with other gradients
and other projections.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import coins, subkey, subkeys
from aipod._misc.tree import axpy, cast_like
from aipod.sets import AbstractSet
from aipod.slots._compression import told

Gradient = Callable[[PyTree, PRNGKeyArray], PyTree]


def proxskip(
    gradient: Gradient,
    constraint: AbstractSet,
    start: PyTree,
    correction: PyTree,
    *,
    rate: Array,
    probability: float | Array,
    steps: int,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree, Array]:
    """`steps` iterations; the last iterate, the last correction, and how often it projected.

    The projection is that of `constraint`, a set with x fixed.

    v_hat = v - rate (gradient(v) - r)
    with probability p:   v <- project(v_hat - (rate / p) r),   r <- r + (p / rate) (v - v_hat)
    otherwise:            v <- v_hat
    """
    coin_key, keys = step_keys(key, steps)
    tosses = coins(coin_key, probability, steps)

    def body(carry: tuple[PyTree, PyTree], inputs: tuple[Array, Any]) -> tuple[Any, None]:
        point, residual = carry
        coin, draw_key = inputs
        ahead = local_step(gradient(point, draw_key), point, residual, rate)

        def projected() -> tuple[PyTree, PyTree]:
            new, corrected, _ = settle(
                constraint,
                ahead,
                residual,
                rate=rate,
                probability=probability,
                key=subkey(draw_key, 1),
            )
            return new, corrected

        def skipped() -> tuple[PyTree, PyTree]:
            return ahead, residual

        # One scalar coin outside vmap: a skipped projection is not computed.
        return jax.lax.cond(coin, projected, skipped), None

    (point, residual), _ = jax.lax.scan(body, (start, correction), (tosses, keys))
    return point, residual, jnp.sum(tosses)


def local_steps(
    gradient: Gradient,
    start: PyTree,
    correction: PyTree,
    *,
    rate: Array,
    steps: int,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree]:
    """`steps` iterations that all skip the projection; `settle` makes up for it afterwards.

    The iterate half way, after steps // 2 of them, and the last one.
    """
    keys, count = step_keys(key, steps)[1], steps // 2

    def one(point: PyTree, draw_key: PRNGKeyArray) -> tuple[PyTree, None]:
        return local_step(gradient(point, draw_key), point, correction, rate), None

    def half(point: PyTree, draw_keys: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        point, _ = jax.lax.scan(one, point, draw_keys)
        return point, point

    # One loop of the compiled program serves both halves.
    last, both = jax.lax.scan(half, start, keys[: 2 * count].reshape(2, count))
    if steps % 2:
        last, _ = one(last, keys[-1])
    return jax.tree.map(lambda leaf: leaf[0], both), last


def local_step(slope: PyTree, point: PyTree, correction: PyTree, rate: Array) -> PyTree:
    """v_hat = v - rate (slope - r)."""
    return axpy(point, -rate, optax.tree.sub(slope, correction))


def settle(
    constraint: AbstractSet,
    ahead: PyTree,
    correction: PyTree,
    known: PyTree | None = None,
    *,
    rate: Array,
    probability: float | Array,
    compression: str | None = None,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree, PyTree | None]:
    """The projection of v_hat, `ahead`, and what the correction becomes by it.

    With `compression`, messages have 16 bits; `known` is what the server knows of each client,
    before and after. A client goes on as if its v_hat had been the one whose message is what it
    really sent. So the corrections still add up to zero.
    """
    offset = optax.tree.scale(rate / probability, correction)
    if compression is not None:
        known = told(optax.tree.sub(ahead, offset), known, compression)
        ahead = cast_like(optax.tree.add(known, offset), ahead)
    chosen = constraint.for_round(key)
    new = cast_like(chosen.project_corrected(ahead, offset), ahead)
    corrected = axpy(correction, probability / rate, optax.tree.sub(new, ahead))
    return new, chosen.keep_absent(corrected, correction), known


def step_keys(key: PRNGKeyArray, steps: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """A key for the coins of a loop, and one for the sample of each of its steps.

    Projected SGD splits its key here too, so that ProxSkip with p = 1 sees the same samples.
    """
    keys = subkeys(key, steps + 1)
    return keys[0], keys[1:]


def check_probability(value: Any, name: str) -> None:
    """Raises `ValueError` unless 0 < value <= 1, or None."""
    if value is None or isinstance(value, jax.core.Tracer):
        return
    if not 0 < float(value) <= 1:
        raise ValueError(
            f"{name} must be a probability in (0, 1], got {float(value)}: 1 projects always."
        )
