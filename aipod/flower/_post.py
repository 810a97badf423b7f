"""Parcels as Flower's messages."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from aipod.flower._parcel import Parcel, from_bytes, to_bytes

# From so many bytes on an `ArrayRecord` is the better vessel.
LARGE = 1 << 20
EXCHANGE, HELLO = "exchange", "hello"
_TYPES = {EXCHANGE: f"train.{EXCHANGE}", HELLO: f"query.{HELLO}"}
# What is sent to look at a model, or to let a client back in; no round of the algorithm needs it.
_ASIDE = ("model@", "shared:")


def to_records(parcel: Parcel) -> RecordDict:
    """Words in a `ConfigRecord`, with the bytes of all arrays, or where they are many beside it.

    An `ArrayRecord` is cut into pieces on its way, and costs some 600 bytes of its own: it is for
    large models.
    """
    lines, buffer = to_bytes(parcel.arrays)
    # What is false, or said by the type of the message, is left out: an exchange is short.
    words: dict[str, Any] = {
        name: word for name, word in parcel.words.items() if word is not False and name != "action"
    }
    records: dict[str, Any] = {}
    if lines:
        words["a"] = lines
        if buffer.size < LARGE:
            words["b"] = buffer.tobytes()
        else:
            records["a"] = ArrayRecord({"b": Array(buffer)})
    return RecordDict(records | {"w": ConfigRecord(words)})


def from_records(records: RecordDict) -> Parcel:
    """The parcel again; `ValueError` when it is none."""
    if "w" not in records.config_records:
        raise ValueError("a message without words is none of aipod's.")
    words: dict[str, Any] = dict(records.config_records["w"])
    lines, data = words.pop("a", []), words.pop("b", None)
    if not lines:
        return Parcel(words)
    if data is not None:
        return Parcel(words, from_bytes(lines, np.frombuffer(data, np.uint8)))
    # Flower reads arrays with NumPy's loader, which refuses pickles.
    buffer = records.array_records["a"]["b"].numpy()
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise ValueError("a message holds something else than bytes.")
    return Parcel(words, from_bytes(lines, buffer))


def size_of(part: Any) -> int:
    """The bytes of a message with all its parts, as Flower writes them to the wire."""
    children = (part.children or {}).values()
    return len(part.deflate()) + sum(size_of(child) for child in children)


def aside(parcel: Parcel) -> int:
    """The bytes of a parcel that do not belong to the algorithm's rounds."""
    return sum(v.nbytes for name, v in parcel.arrays.items() if name.startswith(_ASIDE))


class GridPost:
    """A `Post` over Flower's grid, which counts bytes.

    `up` and `down` are those of the exchanges, all clients together; `aside` are those of models
    for evaluation and of states for clients that come back.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.up = self.down = self.aside = 0

    def nodes(self) -> Iterable[int]:
        return list(self._grid.get_node_ids())

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> dict[int, str]:
        messages = [
            Message(
                to_records(parcel), node, _TYPES[str(parcel.words["action"])], ttl=max(seconds, 1.0)
            )
            for node, parcel in parcels.items()
        ]
        if not messages:
            return {}
        tickets = list(self._grid.push_messages(messages))
        for message, parcel in zip(messages, parcels.values(), strict=True):
            self.down += self._counted(message, parcel)
        pairs = zip(parcels, tickets, strict=False)
        return {node: ticket for node, ticket in pairs if ticket}

    def collect(self, tickets: Iterable[str]) -> dict[str, Parcel | str]:
        waiting = list(tickets)
        found: dict[str, Parcel | str] = {}
        for message in self._grid.pull_messages(waiting) if waiting else ():
            ticket = message.metadata.reply_to_message_id
            if ticket not in waiting:
                continue
            if message.has_error():
                reason = (message.error.reason or "no reason given").strip().splitlines()[-1]
                found[ticket] = f"{reason} (Flower's error {message.error.code})"
                continue
            try:
                parcel = from_records(message.content)
            except ValueError as error:
                found[ticket] = str(error)
                continue
            self.up += self._counted(message, parcel)
            found[ticket] = parcel
        return found

    def _counted(self, message: Message, parcel: Parcel) -> int:
        if not message.metadata.message_type.endswith(EXCHANGE):
            return 0
        beside = aside(parcel)
        self.aside += beside
        return size_of(message) - beside
