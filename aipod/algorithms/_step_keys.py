"""The keys of an outer step."""

import jax
from jaxtyping import Array, PRNGKeyArray

from aipod._misc.keys import as_key, round_key, subkeys


def keys_of(key: PRNGKeyArray, step: Array) -> PRNGKeyArray:
    """The keys of an outer step: of its slots, its samples and the curvature."""
    return subkeys(jax.random.fold_in(as_key(key), step), 6)


def round_key_of(key: PRNGKeyArray, step: Array) -> PRNGKeyArray:
    """What chooses the clients of an outer step; the same as of the round of x."""
    return round_key(keys_of(key, step)[2], 0)
