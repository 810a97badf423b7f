"""Shorter local steps where they follow noise: the step size as a share of the curvature's.

The two halves of S local steps, which move y by a and then by b, agree by

    R = ||a + b||^2 / (||a||^2 + ||b||^2),

2 when they are alike, 1 when they know nothing of each other, less when b undoes a. On convex
quadratics without noise R is at least 1 for every step beta up to 1 / l, because the steps are
(I - beta G)^s d, no two of which point apart. Where there is nothing but noise, R is
(1 + exp(-S beta l / 2)) / 2: long steps carry noise into y that the next ones carry out again.

The share falls while R is below 3/4 and grows otherwise, up to 1. In mere noise it so rests at
beta = 1.4 / (S l), where y averages over about the samples of one outer step. On a noiseless
problem it stays at 1.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.sets import AbstractSet

# Where the share rests. Nearer to 1 averages more, and is slower where noise is not the trouble.
_BALANCE = 0.75
# log(share) moves by this times R - 3/4, but by no more than half of it, in one outer step.
_PACE = 0.4
_LEAST_SHARE = 1e-3


def agreement(lower_set: AbstractSet, start: PyTree, middle: PyTree, end: PyTree) -> Array:
    """R, over all clients; 1 where nothing moved."""

    def square(before: PyTree, after: PyTree) -> Array:
        way = optax.tree.sub(after, before)
        return optax.tree.vdot(way, way)

    measure = jax.vmap(square) if lower_set.per_client else square
    whole = lower_set.summed(measure(start, end))
    halves = lower_set.summed(measure(start, middle) + measure(middle, end))
    return jnp.where(halves > 0, whole / jnp.where(halves > 0, halves, 1.0), 1.0)


def tempered(share: Array, agreement: Array) -> Array:
    """The share of the step that the next outer step takes."""
    change = jnp.exp(_PACE * jnp.clip(agreement - _BALANCE, -0.5, 0.5))
    return jnp.clip(share * change, _LEAST_SHARE, 1).astype(share.dtype)
