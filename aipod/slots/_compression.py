"""Messages of 16 bits per number, with error feedback.

A client sends the difference between what it has to say and what the server already knows,
rounded to 16 bits; both sides then know the same sum (error feedback in the form of EF21). As the
run settles the differences vanish, and with them the rounding error: fixed points stay what they
are. What the server sends back is not rounded.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

KINDS = ("bfloat16", "float16")


def check_compression(value: Any) -> None:
    """Raises `ValueError` unless value is None or the name of a short floating-point type."""
    if value is not None and value not in KINDS:
        raise ValueError(f"compression must be None, 'bfloat16' or 'float16', got {value!r}.")


def told(message: PyTree, known: PyTree, kind: str) -> PyTree:
    """What the server knows after a client has sent its message, when it knew `known` before."""

    def one(new: Any, old: Any) -> Any:
        return (old + (new - old).astype(jnp.dtype(kind)).astype(old.dtype)).astype(old.dtype)

    return jax.tree.map(one, message, known)
