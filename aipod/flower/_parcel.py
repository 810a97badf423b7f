"""What travels: a few words and named arrays, as plain bytes.

All arrays of a parcel go into one buffer, so that a message costs its numbers and little more.
Nothing is pickled, and nothing that arrives is believed before its size and type were checked.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

Word = str | int | float | bool
_TYPES = ("float32", "float64", "int32", "uint32", "int64", "bool")


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Words and arrays; the part of an array's name before the colon says what it belongs to."""

    words: Mapping[str, Word] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def group(self, name: str) -> dict[str, np.ndarray]:
        """The arrays `name:...`, by what stands after the colon."""
        found = {}
        for full, array in self.arrays.items():
            owner, _, rest = full.partition(":")
            if owner == name:
                found[rest] = array
        return found


def to_bytes(arrays: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """A line about each array, and the bytes of all of them."""
    lines, parts = [], []
    for name, value in arrays.items():
        array = np.ascontiguousarray(value)
        shape = "x".join(map(str, np.shape(value)))
        lines.append(f"{name} {array.dtype.name} {shape}".rstrip())
        parts.append(array.reshape(-1).view(np.uint8))
    return lines, np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def from_bytes(lines: list[str], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays again, or `ValueError` when lines and bytes do not fit together."""
    arrays, offset = {}, 0
    for line in lines:
        name, kind, *rest = line.split(" ")
        if kind not in _TYPES or len(rest) > 1:
            raise ValueError(f"a message holds an array that is none: {line!r}.")
        shape = tuple(int(length) for length in rest[0].split("x")) if rest else ()
        if any(length < 0 for length in shape):
            raise ValueError(f"a message holds an array of negative length: {line!r}.")
        dtype = np.dtype(kind)
        # In Python's integers, which do not overflow.
        end = offset + dtype.itemsize * _product(shape)
        if end > buffer.size:
            raise ValueError(f"a message is shorter than it says, at {line!r}.")
        arrays[name] = buffer[offset:end].view(dtype).reshape(shape)
        offset = end
    if offset != buffer.size:
        raise ValueError("a message is longer than it says.")
    return arrays


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result
