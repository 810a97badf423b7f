"""Short messages: a client sends how far it is from what the server knows of it, rounded.

The server adds that to what it knew, and the client keeps the same sum (`known` in the states of
the three slots of E3-AiPOD). Both begin at what all clients share: y, u, and a gradient of zero.
How numbers are rounded is said in `slots/_compression.py`: to bfloat16, or in each array to 16, 8
or 4 bits beside its largest number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from aipod._misc.digest import digest_arrays
from aipod.algorithms import State
from aipod.slots import message_bytes

Rows = dict[str, np.ndarray]

_EIGHT = jnp.dtype("float8_e4m3fn")
_LARGEST = float(jnp.finfo(_EIGHT).max)
# The smallest share of 4 bits, 2^-6.
_SMALLEST = -6


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


def sizes_of(state: Any) -> dict[str, list[int]]:
    """How many numbers each array of x and y has, in the order in which a row holds them."""
    trees = {"x": state.x, "y": state.y}
    return {name: [leaf.size for leaf in jax.tree.leaves(tree)] for name, tree in trees.items()}


def short_size(sizes: Sequence[int], kind: str) -> int:
    """The bytes of a row in a message."""
    return sum(message_bytes(size, kind) for size in sizes)


def shortened(value: np.ndarray, known: np.ndarray, kind: str, sizes: Sequence[int]) -> np.ndarray:
    """The difference, rounded, as bytes."""
    parts = np.split(value - known, np.cumsum(sizes)[:-1])
    return np.concatenate([_encoded(part, kind) for part in parts])


def lengthened(raw: np.ndarray, known: np.ndarray, kind: str, sizes: Sequence[int]) -> np.ndarray:
    """What is known after these bytes; NaN where they are no numbers."""
    ends = np.cumsum([message_bytes(size, kind) for size in sizes])[:-1]
    parts = zip(np.split(raw, ends), sizes, strict=True)
    found = np.concatenate([_decoded(part, kind, size) for part, size in parts])
    with np.errstate(invalid="ignore", over="ignore"):
        return known + found.astype(known.dtype)


def _encoded(part: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        with np.errstate(over="ignore"):
            return part.astype(jnp.bfloat16).view(np.uint8)
    largest = np.abs(part).max(initial=0).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = part / (largest if largest > 0 else 1)
        if kind == "float16":
            codes = share.astype(np.float16).view(np.uint8)
        elif kind == "float8":
            codes = (np.clip(share, -1, 1) * _LARGEST).astype(_EIGHT).view(np.uint8)
        else:
            # 0 for zero, else 1 + the halvings of the largest number; 8 more for a minus sign.
            halvings = -np.clip(np.floor(np.log2(np.abs(share) / 0.75)), _SMALLEST, 0)
            none = ~(np.abs(share) >= 2.0 ** (_SMALLEST - 1))
            codes = np.where(none, 0, 1 + np.nan_to_num(halvings) + 8 * (share < 0))
            codes = np.append(codes.astype(np.uint8), np.zeros(codes.size % 2, np.uint8))
            codes = codes[::2] | codes[1::2] << 4
    return np.concatenate([largest.reshape(1).view(np.uint8), codes])


def _decoded(raw: np.ndarray, kind: str, size: int) -> np.ndarray:
    if kind == "bfloat16":
        return raw.view(jnp.bfloat16).astype(float)
    scale = float(raw[:4].view(np.float32)[0])
    scale = scale if 0 <= scale < np.inf else np.nan
    if kind == "float16":
        return raw[4:].view(np.float16).astype(float) * scale
    if kind == "float8":
        return raw[4:].view(_EIGHT).astype(float) * (scale / _LARGEST)
    codes = np.stack([raw[4:] & 15, raw[4:] >> 4], axis=1).reshape(-1)[:size]
    sizes = np.where(codes & 7 == 0, 0.0, 2.0 ** (1.0 - (codes & 7)))
    return np.where(codes & 8, -sizes, sizes) * scale


def digest_of(rows: Mapping[str, np.ndarray]) -> str:
    """Differs where server and client have lost count of each other."""
    return digest_arrays(rows.items())[:16]
