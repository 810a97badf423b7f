"""Messages of 16, 8 or 4 bits per number, with error feedback.

A client sends the difference between what it has to say and what the server already knows,
rounded; both sides then know the same sum (error feedback in the form of EF21, Richtarik, Sokolov
and Fatkhullin, NeurIPS 2021). As the run settles the differences vanish, and with them the rounding
error: fixed points stay what they are.

The numbers of an array are sent as shares of the largest of them, which travels beside them in 32
bits, so that no unit is too small or too large; but for "bfloat16", which has the range of 32 bits.
Shares of 16 bits are a sign, 5 bits of exponent and 10 of mantissa; of 8 bits a sign, 4 and 3; of 4
bits a sign and one of 1, 1/2, ..., 1/64 and 0. A share is then wrong by at most 2^-11, 1/16 and 1/3
of itself, unless it is below 2^-14, 2^-14 and 2^-6: a share of the error that does not depend on
the size of the array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

KINDS = ("bfloat16", "float16", "float8", "float4")
# The largest number of 8 bits, and the smallest share of 4 bits, 2^-6.
_LARGEST = 448.0
_SMALLEST = -6
# The largest number of an array, in 32 bits.
_SCALE_BYTES = 4


def check_compression(value: Any) -> None:
    """Raises `ValueError` unless value is None or the name of a short floating-point type."""
    if value is not None and value not in KINDS:
        names = ", ".join(repr(kind) for kind in KINDS[:-1])
        raise ValueError(f"compression must be None, {names} or {KINDS[-1]!r}, got {value!r}.")


def rounds_both_ways(kind: str | None) -> bool:
    """Whether what the server sends of x is rounded too."""
    return kind in ("float8", "float4")


def message_bytes(numbers: int, kind: str) -> int:
    """The bytes of an array of so many numbers in a message."""
    if kind == "float8":
        return numbers + _SCALE_BYTES
    if kind == "float4":
        return -(-numbers // 2) + _SCALE_BYTES
    if kind == "float16":
        return 2 * numbers + _SCALE_BYTES
    return 2 * numbers


def told(message: PyTree, known: PyTree, kind: str) -> PyTree:
    """What the server knows after a client has sent its message, when it knew `known` before.

    Arrays have a row for each client.
    """

    def one(new: Any, old: Any) -> Any:
        return (old + _rounded(new - old, kind).astype(old.dtype)).astype(old.dtype)

    return jax.tree.map(one, message, known)


def _rounded(difference: Array, kind: str) -> Array:
    if kind == "bfloat16":
        return difference.astype(jnp.bfloat16)
    axes = tuple(range(1, difference.ndim))
    largest = jnp.max(jnp.abs(difference), axis=axes, keepdims=True).astype(jnp.float32)
    scale = largest.astype(difference.dtype)
    share = difference / jnp.where(scale > 0, scale, 1)
    if kind == "float16":
        return share.astype(jnp.float16).astype(difference.dtype) * scale
    if kind == "float8":
        short = (jnp.clip(share, -1, 1) * _LARGEST).astype(jnp.float8_e4m3fn)
        return short.astype(difference.dtype) * (scale / _LARGEST)
    # The nearest power of two: 3/4 of the next one is half way.
    exponent = jnp.floor(jnp.log2(jnp.abs(share) / 0.75))
    power = jnp.exp2(jnp.clip(exponent, _SMALLEST, 0)).astype(difference.dtype)
    size = jnp.where(jnp.abs(share) < 2.0 ** (_SMALLEST - 1), 0, power)
    return jnp.sign(share) * size * scale
