"""An estimate of the curvature that still holds at the end of the step that it allows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.stepsize._power import beside, norm

# The estimate is looked for anew where the step that it allows meets more than this many times of
# it, within this range, by so many halvings of its logarithm at most.
_FURTHER, _TOO_FAR, _HALVINGS = 2.0, 1e12, 12
# A step of so many rounding errors of y is too short to tell a curvature by.
_ROUNDED = 100.0


def ahead(
    slope_at: Callable[[PyTree], PyTree],
    y: PyTree,
    slope: PyTree,
    size: Array,
    *,
    per_client: bool,
) -> Array:
    """An estimate that still holds at the end of the step that it allows.

    The curvature l on the way to y - slope / l comes from the slope there. Where the objective is
    flat at y and bends further on, it is more than `size`; then the least l is looked for that is
    as large as what it leads to. Elsewhere this costs one gradient.
    """
    steep = norm(slope, per_client=per_client)
    told = _largest_told(y, slope, per_client=per_client)

    def met(curvature: Array) -> Array:
        length = 1 / curvature
        point = jax.tree.map(lambda a, b: (a - beside(length, b) * b).astype(a.dtype), y, slope)
        change = norm(optax.tree.sub(slope_at(point), slope), per_client=per_client)
        found = change * curvature / jnp.where(steep > 0, steep, 1.0)
        # Out of the domain of a logarithm, say: certainly too far.
        found = jnp.where(jnp.isfinite(found), found, jnp.inf)
        return jnp.where((curvature < told) | jnp.isinf(found), found, 0.0)

    low = jnp.where(size > 0, size, 1.0)
    first = met(low)
    high = jnp.where(jnp.isfinite(first), jnp.maximum(first, low), low * _TOO_FAR)
    # Where nothing bends at y, the first step has no scale, and may be far too short as well.
    low = jnp.where(size > 0, low, high / _TOO_FAR)
    searched = first > _FURTHER * size

    def searching(carry: tuple[Array, Array, Array]) -> Array:
        low, high, count = carry
        return jnp.any(searched & (high > _FURTHER * low)) & (count < _HALVINGS)

    def halved(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, count = carry
        middle = jnp.sqrt(low) * jnp.sqrt(high)
        enough = met(middle) <= middle
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high), count + 1

    start = (low, high, jnp.zeros((), jnp.int32))
    _, found, _ = jax.lax.while_loop(searching, halved, start)
    return jnp.where(searched, found, jnp.maximum(size, first))


def _largest_told(y: PyTree, slope: PyTree, *, per_client: bool) -> Array:
    """The curvature l above which steps of slope / l are too short to tell one by.

    They change the slope by little more than its rounding errors. Leaf by leaf: each may have a
    unit of its own, and one that moves far enough is enough.
    """

    def most(leaf: Array, down: Array) -> Array:
        size = _ROUNDED * jnp.finfo(leaf.dtype).eps * norm(leaf, per_client=per_client)
        return jnp.where(size > 0, norm(down, per_client=per_client) / size, jnp.inf)

    found = jax.tree.map(most, y, slope)
    return jax.tree.reduce(jnp.maximum, found)
