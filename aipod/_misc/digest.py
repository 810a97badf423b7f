"""Digests that tell arrays and texts apart, and are the same on every machine."""

import hashlib
import re
from collections.abc import Iterable

import numpy as np

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_AT_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_arrays(named: Iterable[tuple[str, np.ndarray]]) -> str:
    """32 hexadecimal digits of arrays: their names (which may be empty), types, shapes, values."""
    digest = hashlib.sha256()
    for name, array in named:
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def digest_text(text: str, *, digits: int = 32, keep_at: bool = True) -> str:
    """Hexadecimal digits of a text without the memory addresses in it.

    **Arguments:**

    - `digits`: how many.
    - `keep_at`: whether `<f at 0x7f..>` is read as `<f at 0x>`, else as `<f>`. Files exist with
        digests of either kind.
    """
    plain = _ADDRESS.sub("0x", text) if keep_at else _AT_ADDRESS.sub("", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:digits]
