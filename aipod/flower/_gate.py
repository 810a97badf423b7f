"""The gate: everything that leaves a client passes here, and nothing else does.

A session hands over a `Draft`: whatever the request made it compute, as it is. The gate makes the
message of it, and is the only place where a client makes one. `Gate` lets out what the algorithm
needs. `PrivateGate` knows three things that may leave: the three vectors of an exchange, each cut
and with fresh noise; what the server could compute itself from what it has sent; and numbers that
do not depend on data.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from aipod.algorithms import Alternating, State
from aipod.flower._account import Account
from aipod.flower._mailbox import POINT, TABLES, Table, Tables, ready
from aipod.flower._noise import grid_of, noisy
from aipod.flower._parcel import Parcel, Word
from aipod.flower._parts import forget_own, model_leaves, shared_leaves
from aipod.flower._privacy import Privacy
from aipod.stepsize import Rates

# The rows of each table that an exchange of E3-AiPOD asks for: the gradient; y and u.
_ROWS = {"x": 1, "y": 2, "number": 0}


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
    """

    step: int
    digest: str
    values: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a request made a client compute.

    - `state`: now; questions belong to the step that it begins.
    - `models`: the state after each outer step that is to be recorded.
    - `paused`: whether the server asks for the shared part of the state.
    - `asked`, `used`, `answers`: the questions of the step, how many, and what is answered.
    """

    state: State
    models: Mapping[int, State]
    paused: bool
    asked: Tables | None
    used: Mapping[str, int]
    answers: Tables


class AbstractGate(abc.ABC):
    """What a client lets out."""

    solver: Alternating

    def greeting(self, words: Mapping[str, Word]) -> Parcel:
        """Who the client is and how far; none of it depends on data."""
        names = ("index", "clients", "weight", "solver", "step", "exchange")
        return Parcel({name: words[name] for name in names})

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
            arrays |= {
                f"asked:{name}.{row}.{int(table.words[row])}": table.values[row]
                for name, table in self._questions(draft, release).items()
                for row in np.flatnonzero(table.words)
            }
        return Parcel({"step": int(draft.state.step)}, arrays)


class Gate(AbstractGate):
    """Without privacy: everything that the algorithm needs leaves as it is."""

    def __init__(self, solver: Alternating) -> None:
        self.solver = solver

    @property
    def private(self) -> bool:
        return False

    def check_leave(self, shared: bool) -> None:
        pass

    def release(self, draft: Draft, last: Release | None) -> None:
        return None

    def settled(self, old: State, new: State, asked: Tables, last: Release | None) -> State:
        return new

    def _shown(self, state: State) -> State:
        return state

    def _questions(self, draft: Draft, release: Release | None) -> Tables:
        return ready(draft.asked or {}, dict(draft.used), draft.answers)


class PrivateGate(AbstractGate):
    """With privacy: three vectors an exchange, cut and noisy, counted, within a budget."""

    def __init__(self, solver: Alternating, privacy: Privacy, folder: Path, index: int) -> None:
        privacy.check(solver)
        self.solver, self._privacy = solver, privacy
        self._account = Account(folder, index)

    @property
    def private(self) -> bool:
        return True

    def check_leave(self, shared: bool) -> None:
        if not shared:
            # Ending a step alone moves x, y and u by what the data say. With a state from the
            # server all of them are replaced before anything can be seen of it.
            raise ValueError(
                "a request to end a step alone brings no state to go on from: its result would "
                "show the data without noise, so it is refused."
            )

    def release(self, draft: Draft, last: Release | None) -> Release | None:
        if draft.asked is None:
            return last
        if any(int(draft.used[name]) != rows for name, rows in _ROWS.items()):
            raise ValueError(
                "this step asks for more than the three vectors that privacy covers: it is refused."
            )
        privacy, known = self._privacy, _known(draft.state, draft.asked)
        values = {name: np.asarray(draft.asked[name].values[: len(known[name])]) for name in known}
        digest = _digest(int(draft.state.step), privacy, values, known)
        if last is not None and last.digest == digest:
            return last
        self._account.spend(privacy.mu, privacy.budget, privacy.delta)
        deviation = privacy.noise * privacy.clip
        grid = grid_of(deviation)
        sent = {
            name: np.stack(
                [
                    point + grid * noisy(value.astype(float) - point, privacy.clip, grid, deviation)
                    for value, point in zip(values[name], known[name], strict=True)
                ]
            ).astype(values[name].dtype)
            for name in values
        }
        return Release(int(draft.state.step), digest, sent)

    def _questions(self, draft: Draft, release: Release | None) -> Tables:
        asked: Tables = draft.asked or {}
        found: Tables = {}
        for name in TABLES:
            values, words = (np.array(part) for part in (asked[name].values, asked[name].words))
            words[_ROWS[name] :] = 0
            words[np.asarray(draft.answers[name].words) != 0] = 0
            values[:] = 0
            if release is not None and name in release.values:
                values[: _ROWS[name]] = release.values[name]
            # Rows that hold NaN are sent too: which rows do would tell of the data.
            found[name] = Table(values, words)
        return found

    def _shown(self, state: State) -> State:
        # What a client's adjoint has seen was never covered by noise.
        return forget_own(self.solver, state)

    def settled(self, old: State, new: State, asked: Tables, last: Release | None) -> State:
        """With corrections as if what was sent had been meant.

        Only then do the corrections of all clients add up to zero.
        """
        if last is None or last.step != int(old.step):
            raise ValueError("answers have arrived to what this client has not asked: refused.")
        changes = np.asarray(last.values["y"]) - np.asarray(asked["y"].values)[: _ROWS["y"]]
        rates = Rates(old.step, None)
        restore = ravel_pytree(new.y)[1]
        slots: Any = (self.solver.lower, self.solver.adjoint)
        before = (old.lower, old.adjoint)
        lower, adjoint = (
            _finite(slot.resent(state, restore(jnp.asarray(change)), rates), kept)
            for slot, state, change, kept in zip(
                slots, (new.lower, new.adjoint), changes, before, strict=True
            )
        )
        return dataclasses.replace(new, lower=lower, adjoint=adjoint)


def _finite(new: Any, old: Any) -> Any:
    """The new slot's state; with the old correction where the new one is not finite."""
    usable = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(new.correction))
    return new if usable else dataclasses.replace(new, correction=old.correction)


def _known(state: State, asked: Tables) -> dict[str, list[np.ndarray]]:
    """What all clients know of each vector of E3-AiPOD's round before it is sent."""

    def flat(tree: PyTree) -> np.ndarray:
        return np.asarray(ravel_pytree(tree)[0], float)

    # With a step size x itself is averaged, with an optimiser the gradient.
    x = flat(state.x)
    x = x if int(asked["x"].words[0]) == POINT else np.zeros_like(x)
    return {"x": [x], "y": [flat(state.y), flat(state.adjoint.u)]}


def _digest(
    step: int,
    privacy: Privacy,
    values: Mapping[str, np.ndarray],
    known: Mapping[str, list[np.ndarray]],
) -> str:
    found = hashlib.sha256(f"{step} {privacy.clip!r} {privacy.noise!r}".encode())
    for name in sorted(values):
        found.update(f" {name} {values[name].dtype}".encode())
        found.update(np.ascontiguousarray(values[name]).tobytes())
        found.update(np.stack(known[name]).tobytes())
    return found.hexdigest()
