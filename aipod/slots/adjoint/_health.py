"""What an adjoint slot says about its own solve."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.tree import inner
from aipod.sets import AbstractSet


class Health(eqx.Module):
    """How far off z was in the last outer step, as far as the slot can tell.

    - `left`, `right`: left / right is the square of the relative error of z, or of the residual of
        P G z = P grad_y f, and `right` the squared size of its right-hand side. Two numbers, so
        that their means over many steps give a quotient without the noise of single steps. Both 0
        where a step has nothing to say. In a federation one of each for each client.
    - `bent`: whether G has been seen to bend down: then the lower level is not convex there.
    - `pull`: the share of its own error along z that a step of a warm z removes, so that z needs
        some 1 / pull outer steps to follow x; 1 where z is solved for anew.
    """

    left: Array
    right: Array
    bent: Array
    pull: Array


def healthy(y: PyTree, lower_set: AbstractSet) -> Health:
    """Before the first solve."""
    one = jnp.zeros_like(inner(y, y, per_client=lower_set.per_client))
    return Health(one, one, jnp.zeros(one.shape, bool), jnp.ones_like(one))


def health_of(
    y: PyTree, lower_set: AbstractSet, left: Any, right: Any, bent: Any, pull: Any = 1.0
) -> Health:
    """The same numbers in the shapes and types of `healthy`; one for all clients becomes each's."""
    like = healthy(y, lower_set)

    def each(value: Any, wanted: Array) -> Array:
        return jnp.broadcast_to(value, wanted.shape).astype(wanted.dtype)

    found = (left, like.left), (right, like.right), (bent, like.bent), (pull, like.pull)
    return Health(*(each(value, wanted) for value, wanted in found))


def pull_of(along: Array, size: Array, reach: Any) -> Array:
    """The `pull` of a warm solve, from <z, G z>, |z|^2 and the sum of its step sizes."""
    return jnp.clip(reach * along / jnp.where(size > 0, size, 1.0), 0.0, 1.0)
