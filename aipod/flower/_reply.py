"""What a client may say: every greeting and every reply is checked before the server uses it.

A client may be of another version, damaged or hostile. Whatever it sends, the worst that follows
is that it counts as absent.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from aipod.algorithms import Alternating, State
from aipod.flower._mailbox import TABLES, empty_tables
from aipod.flower._masks import as_bytes, usable
from aipod.flower._parcel import Parcel, plain
from aipod.flower._parts import model_leaves, shared_leaves, with_shared
from aipod.flower._progress import Hello, Terms
from aipod.flower._short import Rows, digest_of, first_rows, lengthened, short_size, sizes_of

_QUESTION = re.compile(r"(x|y|number)\.(0|[1-9][0-9]{0,5})\.[1-5]")
_MODEL = re.compile(r"model@([1-9][0-9]{0,9})")
_MOST_CLIENTS = 2**31 - 1


class BadReplyError(ValueError):
    """A greeting or a reply that no client of this run would send."""


class StrayedError(BadReplyError):
    """What a client keeps and what the server keeps of it have come apart."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply whose names, types and shapes are those that the server expects.

    - `step`: the outer step that the client is at.
    - `asked`: its questions, by `table.row.kind`.
    - `models`: its models, by outer step.
    - `shared`: the part of its state that all clients share.
    - `finite`: whether its numbers can be averaged: none is NaN, infinite, or so large that its
        square would be.
    """

    step: int
    asked: Mapping[str, np.ndarray]
    models: Mapping[int, Mapping[str, np.ndarray]]
    shared: Mapping[str, np.ndarray]
    finite: bool


@dataclasses.dataclass(frozen=True)
class Masked:
    """Vectors under masks, and the clients whose letters their sender cannot open.

    There are no vectors where too few letters could be opened.
    """

    vectors: Mapping[str, np.ndarray]
    closed: set[int]


class Expected:
    """What the replies of one run may hold, from the state that the run starts from."""

    def __init__(self, solver: Alternating, state: State, terms: Terms) -> None:
        self._terms = terms
        self._shared = _kinds(shared_leaves(solver, state))
        self._model = _kinds(model_leaves(solver, state))
        x, y = jax.tree.map(lambda leaf: leaf[0], (state.x, state.y))
        tables = empty_tables(x, y, [1] * len(TABLES))
        self._rows = _kinds({name: table.values[0] for name, table in tables.items()})
        self._solver, self._state, self.wire = solver, state, solver.wire
        self._sizes = sizes_of(state)

    def first_known(self, shared: Mapping[str, np.ndarray]) -> Rows:
        """What is known of a client that begins from this state; empty unless it is needed."""
        if self.wire is None:
            return {}
        return first_rows(with_shared(self._solver, self._state, shared))

    def reply(self, parcel: Parcel, last: int, known: Mapping[str, np.ndarray]) -> Reply:
        """The reply, or `BadReplyError`.

        **Arguments:**

        - `last`: the last step that a client can be at.
        - `known`: with short messages, what is known of the client.
        """
        if "error" in parcel.words:
            raise BadReplyError(_failure(parcel.words["error"]))
        step = _whole(parcel.words, "step", 0, last)
        asked: dict[str, np.ndarray] = {}
        models: dict[int, dict[str, np.ndarray]] = {}
        shared: dict[str, np.ndarray] = {}
        for full, value in parcel.arrays.items():
            group, _, name = full.partition(":")
            model = _MODEL.fullmatch(group)
            if (
                group == "asked"
                and not self._terms.secure
                and (question := _QUESTION.fullmatch(name))
            ):
                asked[name] = self._whole_vector(full, value, question[1], known)
            elif group == "open" and self._terms.secure and _QUESTION.fullmatch(name):
                _require(full, value, (np.dtype(bool), ()))
                asked[name] = value
            elif group == "shared" and name in self._shared:
                _require(full, value, self._shared[name])
                shared[name] = value
            elif model and name in self._model:
                _require(full, value, self._model[name])
                models.setdefault(self._recorded(int(model[1]), step), {})[name] = value
            else:
                raise BadReplyError(f"it sent {plain(full)}, which nobody asked for")
        for found, wanted in [(shared, self._shared), *((m, self._model) for m in models.values())]:
            if found and len(found) != len(wanted):
                raise BadReplyError("it sent a part of a model or of a state")
        if asked and self.wire is not None and parcel.words.get("known") != digest_of(known):
            raise StrayedError("it begins from other vectors than the server knows of it")
        finite = all(map(_usable, [*parcel.arrays.values(), *asked.values()]))
        return Reply(step, asked, models, shared, finite)

    def _whole_vector(
        self, full: str, value: np.ndarray, table: str, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """What a question holds, also where it was sent short."""
        dtype, shape = self._rows[table]
        if self.wire is None or table == "number":
            _require(full, value, (dtype, shape))
            return value
        sizes = self._sizes[table]
        _require(full, value, (np.dtype(np.uint8), (short_size(sizes, self.wire),)))
        row = full.partition(":")[2].rpartition(".")[0]
        if row not in known:
            raise BadReplyError(f"it sent {plain(full)}, which nobody asked for")
        return lengthened(value, known[row], self.wire, sizes)

    def _recorded(self, step: int, reached: int) -> int:
        terms = self._terms
        if step > reached or (step % terms.every and step != terms.steps):
            raise BadReplyError(f"it sent a model of outer step {step}, which nobody asked for")
        return step

    def masked(self, parcel: Parcel, names: Collection[str], others: Collection[int]) -> Masked:
        """Vectors under masks with these names, or `BadReplyError`.

        `others`: the clients whose letters it was sent.
        """
        if "error" in parcel.words:
            raise BadReplyError(_failure(parcel.words["error"]))
        found, closed = parcel.group("masked"), parcel.group("closed")
        if not set(closed) <= {str(other) for other in others}:
            raise BadReplyError("it cannot open letters that it was not sent")
        declined = not found and bool(closed)
        if not (declined or set(found) == set(names)) or len(parcel.arrays) != len(found) + len(
            closed
        ):
            raise BadReplyError("it sent other vectors than those that it named")
        for name, value in found.items():
            _, shape = self._rows[name.partition(".")[0]]
            _require(name, value, (np.dtype(np.int64), shape))
        return Masked(found, {int(other) for other in closed})

    def of_row(self, name: str) -> np.dtype[Any]:
        """The type of a question's numbers."""
        return self._rows[name.partition(".")[0]][0]


def read_words(parcel: Parcel, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """The arrays with these names and so many words each, as bytes; or `BadReplyError`."""
    if "error" in parcel.words:
        raise BadReplyError(_failure(parcel.words["error"]))
    if set(parcel.arrays) != set(wanted):
        raise BadReplyError("it sent other parts of a secure sum than it was asked for")
    for name, size in wanted.items():
        _require(name, parcel.arrays[name], (np.dtype(np.uint32), (size,)))
    return {name: as_bytes(value) for name, value in parcel.arrays.items()}


def read_greeting(node: int, words: Mapping[str, Any], digest: str, last: int) -> Hello:
    """What a client says about itself, or `BadReplyError`.

    **Arguments:**

    - `node`: the node that says it.
    - `words`: what it said.
    - `digest`: of the server's solver.
    - `last`: the last outer step that a client can be at.
    """
    if "error" in words:
        raise BadReplyError(_failure(words["error"]))
    if words.get("solver") != digest:
        raise BadReplyError("its solver has other arguments than the server's")
    clients = _whole(words, "clients", 1, _MOST_CLIENTS)
    weight = words.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < np.inf:
        raise BadReplyError(f"its weight is {plain(weight)}, not a positive number")
    return Hello(
        node,
        _whole(words, "index", 0, clients - 1),
        clients,
        float(weight),
        _whole(words, "step", -1, last),
        _whole(words, "exchange", -1, 2**62),
        _key(words.get("key")),
    )


def _key(word: Any) -> bytes:
    if word is None:
        return b""
    if not isinstance(word, str) or not re.fullmatch(r"[0-9a-f]{64}", word):
        raise BadReplyError(f"its key is {plain(word)}, not 32 bytes in hexadecimal digits")
    if not usable(key := bytes.fromhex(word)):
        raise BadReplyError("nobody can agree on anything with its key")
    return key


def _failure(word: Any) -> str:
    # A client tells the name of an exception, and no more: the text may hold data.
    text = plain(word)
    return f"it failed with {text}, which its own log explains" if text.isidentifier() else text


def _whole(words: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = words.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadReplyError(f"its {name} is {plain(value)}, not a number from {least} to {most}")
    return value


_Kind = tuple[np.dtype[Any], tuple[int, ...]]


def _kind(array: np.ndarray) -> _Kind:
    return array.dtype, array.shape


def _kinds(arrays: Mapping[str, np.ndarray]) -> dict[str, _Kind]:
    return {name: _kind(array) for name, array in arrays.items()}


def _require(name: str, value: np.ndarray, wanted: _Kind) -> None:
    if _kind(value) != wanted:
        dtype, shape = wanted
        raise BadReplyError(
            f"its {name} is {value.dtype}{value.shape} where the server has {dtype}{shape}: do "
            "server and clients use the same model, and both float32 or both float64?"
        )


def _usable(value: np.ndarray) -> bool:
    if value.dtype.kind != "f":
        return True
    # Sums of such numbers do not overflow, nor do their norms.
    bound = np.sqrt(np.finfo(value.dtype).max)
    return bool(np.all(np.abs(value) < bound))
