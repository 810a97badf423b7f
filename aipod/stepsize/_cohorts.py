"""Shorter local steps while the clients of a cohort pull in different directions.

With some of the clients absent, y moves by the mean of the moves d_m of c clients. Their spread
says how much of that mean is due to who happened to be there:

    N = (mean ||d_m||^2 - ||mean d_m||^2) / (c - 1),   beside   ||mean d_m||^2.

While clients' corrections are not known yet, or x outruns them, the d_m differ, and the mean of
another cohort would lead elsewhere. The share of the curvature's step falls while N is above 0.3
times ||mean d_m||^2 and grows otherwise, up to 1. It does not fall below a fifth: shorter steps
than that only made y late in what we measured. Clients that are alike have N = 0 and keep their
steps. With all clients present nothing is left to chance, and nothing changes.
"""

import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import inner
from aipod.sets import AbstractSet
from aipod.stepsize._tempering import tempered

_BALANCE, _LEAST_SHARE = 0.3, 0.2


def spread_of(lower_set: AbstractSet, start: PyTree, end: PyTree) -> Array:
    """The sum of ||d_m||^2 over the clients that are present, and their number."""
    way = optax.tree.sub(end, start)
    squares = inner(way, way, per_client=True)
    return jnp.stack([lower_set.summed(squares), lower_set.summed(jnp.ones_like(squares))])


def calmed(share: Array, spread: Array, way: PyTree) -> Array:
    """The share of the step that the next outer step takes, after y moved by `way`, their mean."""
    total, clients = spread
    mean = inner(way, way)
    chance = jnp.maximum(total / clients - mean, 0.0) / jnp.maximum(clients - 1, 1.0)
    ratio = jnp.where(mean > 0, chance / jnp.where(mean > 0, mean, 1.0), 0.0)
    return tempered(share, -ratio, balance=-_BALANCE, least=_LEAST_SHARE)
