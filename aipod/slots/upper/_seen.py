"""What an upper slot lets others see: the projected hypergradient that it has just used."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.tree import cast_like, inner
from aipod.problem import Bilevel
from aipod.sets import AbstractSet


class Seen(eqx.Module):
    """The projected hypergradient of the last step on x.

    It is what the slot computed anyway, so keeping it costs no projection and no round.

    - `gradient`: P_x (grad_x f + w), or (x - x_new) / alpha where only the new x is projected; on a
        set with bounds the gradient mapping.
    - `rate`: how far x moved along it: for a plain step alpha.
    - `fresh`: whether the last outer step gave a new one; None where every step does.
    - `off`: where projections are skipped, the squared distance from the set before the last one.
    - `difference`: whether it is a difference of two points, with their rounding error in it.
    """

    gradient: PyTree
    rate: Array
    fresh: Array | None = None
    off: Array | None = None
    difference: bool = eqx.field(static=True, default=False)


class UpperState(eqx.Module):
    """What an upper slot keeps.

    - `own`: the optimiser's state, or None.
    - `seen`: the last projected hypergradient.
    - `known`: with compression, what the server knows of each client; with a memory, its last
        direction.
    - `landed`: where projections are skipped, x after the last one.
    - `length`: where an optimiser moves x in a set with bounds, eta of its gradient mapping.
    - `correction`: in gossip, s.
    - `heard`: with compression in both directions, what clients know of the mean direction.
    - `average`, `part`: with a memory, the mean of what is known of all clients, and the share of
        them that takes part in an outer step.
    """

    own: PyTree
    seen: Seen
    known: PyTree = None
    landed: PyTree = None
    length: Array | None = None
    correction: PyTree = None
    heard: PyTree = None
    average: PyTree = None
    part: Array | None = None


def but_messages(state: UpperState) -> PyTree:
    """True for what all clients have alike; False for what the server knows of each of them."""
    mask = jax.tree.map(lambda _: True, state)
    return dataclasses.replace(mask, known=jax.tree.map(lambda _: False, state.known))


def nothing_seen(
    problem: Bilevel, x: PyTree, *, difference: bool = False, skips: bool = False
) -> Seen:
    """Before the first step."""
    zero = jax.tree.map(jnp.zeros_like, x)
    rate = jnp.zeros_like(inner(zero, zero, per_client=problem.upper_set.per_client))
    if skips:
        return Seen(zero, rate, jnp.asarray(False), rate, difference)
    return Seen(zero, rate, difference=difference)


def by_difference(before: Seen, x: PyTree, landed: PyTree, length: Array) -> Seen:
    """(x - landed) / length, for a step that was projected after it was made."""
    # A schedule may end at 0: then nothing moves, and nothing is seen.
    divisor = jnp.where(length > 0, length, 1.0)
    gradient = jax.tree.map(lambda a, b: ((a - b) / divisor).astype(a.dtype), x, landed)
    return dataclasses.replace(before, gradient=gradient, rate=_rate(before, length))


def by_direction(before: Seen, direction: PyTree, length: Array) -> Seen:
    """The direction itself, where there is no constraint."""
    gradient = cast_like(direction, before.gradient)
    return dataclasses.replace(before, gradient=gradient, rate=_rate(before, length))


def _rate(before: Seen, length: Array) -> Array:
    return jnp.broadcast_to(length, before.rate.shape).astype(before.rate.dtype)


def by_optimizer(
    before: Seen, upper_set: AbstractSet, along: PyTree, x: PyTree, new: PyTree, scale: Any = 1.0
) -> Seen:
    """`along` / scale, after an optimiser has moved x to `new`; its rate is the move along it."""
    divisor = jnp.where(jnp.asarray(scale) > 0, scale, 1.0)
    gradient = jax.tree.map(lambda leaf: (leaf / divisor).astype(leaf.dtype), along)
    gradient = cast_like(gradient, before.gradient)
    moved = jax.tree.map(jnp.subtract, x, new)
    per_client = upper_set.per_client
    along_it = inner(gradient, moved, per_client=per_client)
    size = inner(gradient, gradient, per_client=per_client)
    rate = along_it / jnp.where(size > 0, size, 1.0)
    return dataclasses.replace(before, gradient=gradient, rate=rate.astype(before.rate.dtype))
