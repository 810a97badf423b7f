"""The gate of a client with privacy: three vectors an exchange, cut, noisy and counted."""

import dataclasses
import hashlib
import math
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
from aipod.flower._gate import AbstractGate, Draft, Release, check_shared
from aipod.flower._mailbox import POINT, TABLES, Table, Tables
from aipod.flower._noise import grid_of, noisy
from aipod.flower._parts import forget_own
from aipod.flower._privacy import Privacy

# The rows of each table that an exchange of E3-AiPOD asks for: the gradient; y and u.
_ROWS = {"x": 1, "y": 2, "number": 0}


class PrivateGate(AbstractGate):
    """With privacy: three vectors an exchange, cut and noisy, counted, within a budget."""

    def __init__(
        self,
        solver: Alternating,
        privacy: Privacy,
        folder: Path,
        index: int,
        honest: int | None = None,
    ) -> None:
        """`honest`: with secure sums, how many clients make the noise of a sum together."""
        privacy.check(solver)
        self.solver, self._privacy, self._honest = solver, privacy, honest
        self.secure = honest is not None
        self._account = Account(folder, index)

    @property
    def private(self) -> bool:
        return True

    def check_leave(self, shared: bool) -> None:
        check_shared(shared)

    def release(self, draft: Draft, last: Release | None) -> Release | None:
        # With secure sums the message is made when its round comes.
        if draft.asked is None or (self.secure and draft.round is None):
            return last
        if any(int(draft.used[name]) != rows for name, rows in _ROWS.items()):
            raise ValueError(
                "this step asks for more than the three vectors that privacy covers: it is refused."
            )
        privacy, known = self._privacy, _known(draft.state, draft.asked)
        values = {name: np.asarray(draft.asked[name].values[: len(known[name])]) for name in known}
        digest = _digest(f"{draft.state.step} {draft.round}", privacy, values, known)
        if last is not None and last.digest == digest:
            return last
        # An account that has lost releases which this run remembers was rolled back, or removed.
        least = 0 if last is None else last.number
        number = self._account.spend(privacy.mu, privacy.budget, privacy.delta, least)
        # Each of the honest clients adds its share of the noise that their sum must have.
        deviation = privacy.noise * privacy.clip / math.sqrt(self._honest or 1)
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
        return Release(int(draft.state.step), digest, sent, number)

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
        """With corrections of zero.

        What was sent is mostly noise, and corrections by it would lead the next local steps away by
        as much: measured, that costs nearly all of the accuracy. Without corrections clients drift
        towards their own solutions in their local steps, as in FedAvg.
        """
        if last is None or last.step != int(old.step):
            raise ValueError("answers have arrived to what this client has not asked: refused.")
        return dataclasses.replace(
            new, lower=_uncorrected(new.lower), adjoint=_uncorrected(new.adjoint)
        )


def _uncorrected(state: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, state.correction)
    return dataclasses.replace(state, correction=zeros)


def _known(state: State, asked: Tables) -> dict[str, list[np.ndarray]]:
    """What all clients know of each vector of E3-AiPOD's round before it is sent."""

    def flat(tree: PyTree) -> np.ndarray:
        return np.asarray(ravel_pytree(tree)[0], float)

    # With a step size x itself is averaged, with an optimiser the gradient.
    x = flat(state.x)
    x = x if int(asked["x"].words[0]) == POINT else np.zeros_like(x)
    return {"x": [x], "y": [flat(state.y), flat(state.adjoint.u)]}


def _digest(
    place: str,
    privacy: Privacy,
    values: Mapping[str, np.ndarray],
    known: Mapping[str, list[np.ndarray]],
) -> str:
    found = hashlib.sha256(f"{place} {privacy.clip!r} {privacy.noise!r}".encode())
    for name in sorted(values):
        found.update(f" {name} {values[name].dtype}".encode())
        found.update(np.ascontiguousarray(values[name]).tobytes())
        found.update(np.stack(known[name]).tobytes())
    return found.hexdigest()
