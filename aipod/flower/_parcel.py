"""The content of a message: a few words and named arrays, as plain bytes.

All arrays of a parcel go into one buffer, so that a message is hardly longer than its numbers.
Nothing is pickled, and sizes and types are checked before anything that arrives is used.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Word = str | int | float | bool
# A name, a type and a shape, as in `answer:y.0 float32 200x10`.
_LINE = re.compile(
    r"([!-~]{1,100}) (float32|float64|uint8|int8|int32|uint32|int64|bool)"
    r"(?: ([0-9]{1,12}(?:x[0-9]{1,12}){0,15}))?"
)


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Words and arrays; an array's name begins with its group, as in `answer:y.0`."""

    words: Mapping[str, Word] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def group(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of one group, by the rest of their names."""
        found = {}
        for full, array in self.arrays.items():
            owner, _, rest = full.partition(":")
            if owner == name:
                found[rest] = array
        return found


def to_bytes(arrays: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """One line for each array (name, type, shape), and the bytes of all arrays together."""
    lines, parts = [], []
    for name, value in arrays.items():
        array = np.ascontiguousarray(value)
        shape = "x".join(map(str, np.shape(value)))
        lines.append(f"{name} {array.dtype.name} {shape}".rstrip())
        parts.append(array.reshape(-1).view(np.uint8))
    return lines, np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def from_bytes(lines: Sequence[str], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays again, or `ValueError` when lines and bytes do not fit together."""
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for line in lines:
        found = _LINE.fullmatch(line) if isinstance(line, str) else None
        if found is None or found[1] in arrays:
            raise ValueError(f"a message describes an array wrongly: {plain(line)}.")
        name, dtype = found[1], np.dtype(found[2])
        shape = tuple(int(length) for length in found[3].split("x")) if found[3] else ()
        # Python's integers do not overflow.
        end = offset + dtype.itemsize * math.prod(shape)
        if end > buffer.size:
            raise ValueError(f"a message is shorter than it says, at {plain(line)}.")
        arrays[name] = buffer[offset:end].view(dtype).reshape(shape)
        offset = end
    if offset != buffer.size:
        raise ValueError("a message is longer than it says.")
    return arrays


def plain(value: object, most: int = 200) -> str:
    """What somebody else sent, as text for a line of a log: short, printable, on one line."""
    text = value if isinstance(value, str) else repr(value)[: 4 * most]
    text = "".join(char if char.isprintable() else "?" for char in text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."
