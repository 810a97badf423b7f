"""Messages of 16 bits: a client sends how far it is from what the server knows of it.

The server adds that to what it knew, and the client keeps the same sum (`known` in the states of
the three slots of E3-AiPOD). Both begin at what all clients share: y, u, and a gradient of zero.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from aipod._misc.digest import digest_arrays
from aipod.algorithms import State

Rows = dict[str, np.ndarray]


def _places(state: Any) -> tuple[PyTree, PyTree, PyTree]:
    return state.upper.known, state.lower.known, state.adjoint.known


def _named(trees: tuple[PyTree, PyTree, PyTree]) -> Rows:
    flat = (np.asarray(ravel_pytree(tree)[0]) for tree in trees)
    return dict(zip(("x.0", "y.0", "y.1"), flat, strict=True))


def known_rows(state: State) -> Rows:
    """What the server knows of a client, by `table.row` of the questions of an outer step."""
    return _named(_places(state))


def first_rows(state: Any) -> Rows:
    """The same before the first message, or after a reset."""
    zeros = jax.tree.map(jnp.zeros_like, state.x)
    return _named((zeros, state.y, state.adjoint.u))


def with_known(state: State, rows: Mapping[str, np.ndarray]) -> State:
    """The state of a client of which the server knows these rows."""
    old = _places(state)
    named = zip(_named(old), old, strict=True)
    new = tuple(ravel_pytree(tree)[1](jnp.asarray(rows[name])) for name, tree in named)
    return eqx.tree_at(_places, state, new)


def marked(mask: State) -> State:
    """The mask of a client's own leaves, with what the server knows of it among them."""
    return eqx.tree_at(_places, mask, jax.tree.map(lambda _: True, _places(mask)))


def shortened(value: np.ndarray, known: np.ndarray, kind: str) -> np.ndarray:
    """The difference in 16 bits."""
    return (value - known).astype(jnp.dtype(kind)).view(np.uint16)


def lengthened(bits: np.ndarray, known: np.ndarray, kind: str) -> np.ndarray:
    """What is known after these bits; not finite where they are those of NaN or infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        return known + bits.view(jnp.dtype(kind)).astype(known.dtype)


def digest_of(rows: Mapping[str, np.ndarray]) -> str:
    """Differs where server and client have lost count of each other."""
    return digest_arrays(rows.items())[:16]
