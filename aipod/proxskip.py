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

from aipod._random import subkey, subkeys
from aipod._tree import axpy, cast_like
from aipod.sets import AbstractSet


def proxskip(
    gradient: Callable[[PyTree, PRNGKeyArray], PyTree],
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
    coins = jax.random.bernoulli(coin_key, probability, (steps,))

    def body(carry: tuple[PyTree, PyTree], inputs: tuple[Array, Any]) -> tuple[Any, None]:
        point, residual = carry
        coin, draw_key = inputs
        slope = optax.tree.sub(gradient(point, draw_key), residual)
        ahead = axpy(point, -rate, slope)

        def projected() -> tuple[PyTree, PyTree]:
            chosen = constraint.for_round(subkey(draw_key, 1))
            correction = optax.tree.scale(rate / probability, residual)
            new = cast_like(chosen.project_corrected(ahead, correction), point)
            moved = optax.tree.sub(new, ahead)
            corrected = axpy(residual, probability / rate, moved)
            return new, chosen.keep_absent(corrected, residual)

        def skipped() -> tuple[PyTree, PyTree]:
            return ahead, residual

        # One scalar coin outside vmap: a skipped projection is not computed.
        return jax.lax.cond(coin, projected, skipped), None

    (point, residual), _ = jax.lax.scan(body, (start, correction), (coins, keys))
    return point, residual, jnp.sum(coins)


def step_keys(key: PRNGKeyArray, steps: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """A key for the coins of a loop, and one for the sample of each of its steps.

    Projected SGD splits its key here too, so that ProxSkip with p = 1 sees the same samples.
    """
    keys = subkeys(key, steps + 1)
    return keys[0], keys[1:]


def check_probability(value: Any, name: str) -> None:
    """Raises `ValueError` unless 0 < value <= 1."""
    if isinstance(value, jax.core.Tracer):
        return
    if not 0 < float(value) <= 1:
        raise ValueError(
            f"{name} must be a probability in (0, 1], got {float(value)}: 1 projects always."
        )
