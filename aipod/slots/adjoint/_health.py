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
    """

    left: Array
    right: Array
    bent: Array


def healthy(y: PyTree, lower_set: AbstractSet) -> Health:
    """Before the first solve."""
    one = jnp.zeros_like(inner(y, y, per_client=lower_set.per_client))
    return Health(one, one, jnp.zeros(one.shape, bool))


def health_of(y: PyTree, lower_set: AbstractSet, left: Any, right: Any, bent: Any) -> Health:
    """The same numbers in the shapes and types of `healthy`; one for all clients becomes each's."""
    like = healthy(y, lower_set)

    def each(value: Any, wanted: Array) -> Array:
        return jnp.broadcast_to(value, wanted.shape).astype(wanted.dtype)

    return Health(each(left, like.left), each(right, like.right), each(bent, like.bent))
