"""Parcels as Flower's messages: the one file that knows Flower's records."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from aipod.flower._parcel import Parcel, from_bytes, plain, to_bytes

# Arrays of this many bytes or more travel in an `ArrayRecord`.
LARGE = 1 << 20
EXCHANGE, HELLO = "exchange", "hello"
_TYPES = {EXCHANGE: f"train.{EXCHANGE}", HELLO: f"query.{HELLO}"}
# Models for evaluation, and states for clients that come back: no part of the algorithm's rounds.
_ASIDE = ("model@", "shared:")


def to_records(parcel: Parcel) -> RecordDict:
    """Words in a `ConfigRecord`, together with the bytes of all arrays unless they are many.

    Many bytes go into an `ArrayRecord`. Flower sends that in pieces, and it adds some 600 bytes.
    """
    lines, buffer = to_bytes(parcel.arrays)
    # To keep messages short: a missing word is false, and the message's type tells the action.
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
    """The parcel again; an error when the records are not those of a parcel."""
    if "w" not in records.config_records:
        raise ValueError("a message without words is none of aipod's.")
    words: dict[str, Any] = dict(records.config_records["w"])
    lines, data = words.pop("a", []), words.pop("b", None)
    if not isinstance(lines, list):
        raise ValueError("a message does not say which arrays it holds.")
    if not lines:
        return Parcel(words)
    if data is not None:
        return Parcel(words, from_bytes(lines, np.frombuffer(data, np.uint8)))
    # Flower reads arrays with NumPy's loader, which refuses pickles.
    buffer = records.array_records["a"]["b"].numpy()
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise ValueError("a message holds something else than bytes.")
    return Parcel(words, from_bytes(lines, buffer))


def received(message: Message) -> Parcel:
    """What a message holds; `ValueError` when it is none of ours, however damaged it is."""
    try:
        return from_records(message.content)
    except Exception as error:
        # Flower reads records when they are used, and what it then raises depends on the damage.
        raise ValueError(
            f"a message that cannot be read ({type(error).__name__}: {plain(str(error))})"
        ) from error


def reply_to(message: Message, parcel: Parcel) -> Message:
    return Message(to_records(parcel), reply_to=message)


def size_of(part: Any) -> int:
    """The bytes of a message with all its parts, as Flower sends them."""
    children = (part.children or {}).values()
    return len(part.deflate()) + sum(size_of(child) for child in children)


def aside(parcel: Parcel) -> int:
    """The bytes of a parcel that are no part of the algorithm's rounds."""
    return sum(v.nbytes for name, v in parcel.arrays.items() if name.startswith(_ASIDE))


class GridPost:
    """A `Post` over Flower's grid, which counts bytes.

    `up` and `down` count the exchanges of all clients together; `aside` counts models for
    evaluation and states for clients that come back.
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
                _, _, reason = (message.error.reason or "no reason given").strip().rpartition("\n")
                found[ticket] = f"{plain(reason)} (Flower's error {message.error.code})"
                continue
            try:
                found[ticket] = parcel = received(message)
                self.up += self._counted(message, parcel)
            except ValueError as error:
                found[ticket] = str(error)
        return found

    def _counted(self, message: Message, parcel: Parcel) -> int:
        if not message.metadata.message_type.endswith(EXCHANGE):
            return 0
        beside = aside(parcel)
        self.aside += beside
        return size_of(message) - beside
