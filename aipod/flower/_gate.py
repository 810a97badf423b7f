"""The gate: everything that leaves a client passes here, and nothing else does.

A session hands over a `Draft`: whatever the request made it compute, as it is. The gate makes the
message of it, and is the only place where a client makes one. `Gate` lets out what the algorithm
needs. `PrivateGate` knows three things that may leave: the three vectors of an exchange, each cut
and with fresh noise; what the server could compute itself from what it has sent; and numbers that
do not depend on data.
"""

import abc
import dataclasses
from collections.abc import Mapping

import numpy as np

from aipod.algorithms import Alternating, State
from aipod.flower._mailbox import DIRECTION, Tables, ready
from aipod.flower._parcel import Parcel, Word
from aipod.flower._parts import forget_own, model_leaves, shared_leaves
from aipod.flower._privacy import check_covered
from aipod.flower._short import digest_of, known_rows, lengthened, shortened, sizes_of, with_known


class LostStateError(ValueError):
    """A request goes on from a state that this client does not have."""


def failure(error: Exception, private: bool) -> Parcel:
    """That a request failed. The text of an exception may hold data, and stays with the client.

    With privacy its type does too: which error it was may depend on the data.
    """
    if isinstance(error, LostStateError):
        return Parcel({"error": "it has lost its state"})
    return Parcel({"error": "PrivateError" if private else type(error).__name__})


@dataclasses.dataclass(frozen=True)
class Release:
    """What left a client in one outer step; it is kept on disk before it leaves.

    - `digest`: of what was behind it. The same content is answered with the same message; any
        other content is a release of its own.
    - `number`: of the release in the client's account.
    """

    step: int
    digest: str
    values: Mapping[str, np.ndarray]
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a request made a client compute.

    - `state`: now; questions belong to the step that it begins.
    - `models`: the state after each outer step that is to be recorded.
    - `paused`: whether the server asks for the shared part of the state.
    - `asked`, `used`, `answers`: the questions of the step, how many, and what is answered.
    - `round`: of secure sums, in which the vectors leave; None outside of such a round.
    """

    state: State
    models: Mapping[int, State]
    paused: bool
    asked: Tables | None
    used: Mapping[str, int]
    answers: Tables
    round: int | None = None


class AbstractGate(abc.ABC):
    """What a client lets out.

    - `secure`: whether vectors leave in secure sums only; a reply then names them.
    """

    solver: Alternating
    secure: bool

    def greeting(self, words: Mapping[str, Word]) -> Parcel:
        """Who the client is and how far; none of it depends on data."""
        names = ("index", "clients", "weight", "solver", "step", "exchange", "key")
        return Parcel({name: words[name] for name in names if name in words})

    @property
    @abc.abstractmethod
    def private(self) -> bool:
        """Whether what leaves is covered by noise."""

    @abc.abstractmethod
    def check_leave(self, shared: bool) -> None:
        """Raises where a client may not end a step alone."""

    @abc.abstractmethod
    def release(self, draft: Draft, last: Release | None) -> Release | None:
        """What is about to leave, for the disk; None where the message can be made again."""

    @abc.abstractmethod
    def settled(self, old: State, new: State, asked: Tables, last: Release | None) -> State:
        """The state after a step, with corrections that fit what was sent."""

    @abc.abstractmethod
    def _shown(self, state: State) -> State:
        """The state as its model may be seen."""

    @abc.abstractmethod
    def _questions(self, draft: Draft, release: Release | None) -> Tables:
        """The questions as they may be seen."""

    def reply(self, draft: Draft, release: Release | None) -> Parcel:
        """The message: models, the shared state, and the questions."""
        arrays: dict[str, np.ndarray] = {}
        for step, state in draft.models.items():
            model = model_leaves(self.solver, state, self._shown(state).watch)
            arrays |= {f"model@{step}:{name}": leaf for name, leaf in model.items()}
        if draft.paused:
            shared = shared_leaves(self.solver, draft.state)
            arrays |= {f"shared:{name}": leaf for name, leaf in shared.items()}
        if draft.asked is not None:
            for name, vector in self.vectors(draft, release).items():
                arrays |= (
                    {f"open:{name}": np.ones((), bool)}
                    if self.secure
                    else {f"asked:{name}": vector}
                )
        return Parcel({"step": int(draft.state.step), **self.words(draft)}, arrays)

    def words(self, draft: Draft) -> dict[str, Word]:
        """What a reply says besides."""
        return {}

    def vectors(self, draft: Draft, release: Release | None) -> dict[str, np.ndarray]:
        """The open questions by `table.row.kind`, as they may leave: alone, or under masks."""
        return {
            f"{name}.{row}.{int(table.words[row])}": table.values[row]
            for name, table in self._questions(draft, release).items()
            for row in np.flatnonzero(table.words)
        }

    def sealed(self, arrays: Mapping[str, np.ndarray]) -> Parcel:
        """What secure sums send: keys, sealed letters, vectors under masks, and shares."""
        return Parcel({}, arrays)


class Gate(AbstractGate):
    """Without privacy: everything that the algorithm needs leaves as it is, or in secure sums."""

    def __init__(self, solver: Alternating, secure: bool = False) -> None:
        if secure:
            check_covered(solver, "secure sums")
        self.solver, self.secure = solver, secure

    @property
    def private(self) -> bool:
        return False

    def words(self, draft: Draft) -> dict[str, Word]:
        if self.solver.wire is None or draft.asked is None:
            return {}
        return {"known": digest_of(known_rows(draft.state))}

    def vectors(self, draft: Draft, release: Release | None) -> dict[str, np.ndarray]:
        """Short where the solver says so, but for single numbers."""
        found, wire = AbstractGate.vectors(self, draft, release), self.solver.wire
        if wire is None:
            return found
        known, sizes = known_rows(draft.state), sizes_of(draft.state)
        if any(name[0] == "x" and not name.endswith(f".{DIRECTION}") for name in found):
            raise ValueError(
                "compression is not sent over Flower where x has bounds: leave it out."
            )
        return {
            name: shortened(value, known[row], wire, sizes[name[0]])
            if (row := name.rpartition(".")[0]) in known
            else value
            for name, value in found.items()
        }

    def check_leave(self, shared: bool) -> None:
        if self.secure:
            check_shared(shared)

    def release(self, draft: Draft, last: Release | None) -> None:
        return None

    def settled(self, old: State, new: State, asked: Tables, last: Release | None) -> State:
        wire = self.solver.wire
        if wire is None:
            return new
        rows = {}
        for row, known in known_rows(old).items():
            table, _, number = row.partition(".")
            parts = sizes_of(old)[table]
            sent = shortened(np.asarray(asked[table].values)[int(number)], known, wire, parts)
            rows[row] = lengthened(sent, known, wire, parts)
        return with_known(new, rows)

    def _shown(self, state: State) -> State:
        return forget_own(self.solver, state) if self.secure else state

    def _questions(self, draft: Draft, release: Release | None) -> Tables:
        return ready(draft.asked or {}, dict(draft.used), draft.answers)


def check_shared(shared: bool) -> None:
    if not shared:
        # Ending a step alone moves x, y and u by what the data say. With a state from the server
        # all of them are replaced before anything can be seen of it.
        raise ValueError(
            "a request to end a step alone brings no state to go on from: its result would show "
            "the data without noise, so it is refused."
        )
