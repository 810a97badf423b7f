"""A client's answer to one request, and what it keeps on disk between two requests."""

import dataclasses
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from aipod._misc.digest import digest_text
from aipod._misc.files import narrow_files, private_folder
from aipod.algorithms import Alternating, State
from aipod.flower._draws import with_first_draws
from aipod.flower._gate import AbstractGate, Draft, Gate, LostStateError
from aipod.flower._kept import Kept, Shelf
from aipod.flower._local import Client, Worker, complete, initial_state, without_the_rest
from aipod.flower._mailbox import KNOWN, TABLES, Table, Tables
from aipod.flower._masks import as_bytes
from aipod.flower._parcel import Parcel, Word
from aipod.flower._parts import forget_own, with_shared
from aipod.flower._privacy import Privacy
from aipod.flower._private import PrivateGate
from aipod.flower._sums import Sums, Wish, long_key
from aipod.flower._within import Within


def solver_digest(solver: Alternating, within: Within = (None, None)) -> str:
    """Differs between solvers with different arguments; the same on server and clients.

    `within`: the sets of x and y, which server and clients must share too.
    """
    text = eqx.tree_pformat(solver, short_arrays=False)
    if any(one is not None for one in within):
        text += eqx.tree_pformat(within, short_arrays=False)
    return digest_text(text, digits=16, keep_at=False)


# Set when this client has made the last step of a run: a process that stays has done its work.
run_ended = threading.Event()


class Session:
    """One client of one federation, with its folder on disk.

    Everything that the next request needs is written before a reply leaves. So the process may end
    after any message, and a crash loses at most the reply. Replies are made by the gate alone.
    """

    def __init__(
        self,
        client: Client,
        solver: Alternating,
        folder: Path,
        privacy: Privacy | None = None,
        wish: Wish | None = None,
    ) -> None:
        self.client, self.solver, self.folder = client, solver, folder
        self._privacy, self._wish = privacy, wish or Wish()
        self.gate = self._gate(secure=self._wish.demanded)
        start = initial_state(solver, client.x, client.y, client.within)
        problem = client.problem()
        problem.check(start.x, start.y)
        self._start = with_first_draws(solver, problem, start)
        self._worker = Worker(solver, problem, self._start)

    def _digest(self) -> str:
        return solver_digest(self.solver, self.client.within)

    def _gate(self, *, secure: bool) -> AbstractGate:
        if self._privacy is None:
            return Gate(self.solver, secure)
        # Less noise than for a message alone needs the owner's word, and not the server's, that so
        # many honest clients add theirs.
        honest = (self._wish.least if self._wish.demanded else 1) if secure else None
        return PrivateGate(self.solver, self._privacy, self.folder, int(self.client.index), honest)

    def handle(self, request: Parcel) -> Parcel:
        """The reply to one request."""
        secure = bool(request.words.get("secure"))
        if self._wish.demanded and not secure:
            raise ValueError(
                "this node lets vectors out in secure sums alone: set secure=true in the run "
                "configuration."
            )
        if secure != self.gate.secure:
            self.gate = self._gate(secure=secure)
        run = str(request.words["run"])
        if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run):
            raise ValueError(f"{run!r} is not the name of a run: use letters, digits, - and _.")
        place = private_folder(private_folder(self.folder / run) / f"client-{self.client.index}")
        shelf = Shelf(place, {"run": run, "solver": self._digest()})
        sums = None
        if secure:
            key = long_key(self.folder, int(self.client.index))
            sums = Sums(place, run, int(self.client.index), key, self._wish)
        if "turn" not in request.words:
            return self._hello(shelf, sums)
        try:
            if sums is not None and "phase" in request.words:
                return self._sum(shelf, request, sums)
            return self._exchange(shelf, request)
        finally:
            narrow_files(place)

    def _hello(self, shelf: Shelf, sums: Sums | None) -> Parcel:
        found = shelf.load(self._start)
        key: dict[str, Word] = {} if sums is None else {"key": sums.public.hex()}
        return self.gate.greeting(
            key
            | {
                "index": int(self.client.index),
                "clients": int(self.client.clients),
                "weight": float(self.client.weight),
                "solver": self._digest(),
                "step": -1 if found is None else int(found.state.step),
                "exchange": -1 if found is None else found.exchange,
            }
        )

    def _exchange(self, shelf: Shelf, request: Parcel) -> Parcel:
        words = request.words
        self._worker.robust = bool(words.get("robust"))
        key = jax.random.key(int(words["seed"]))
        found = shelf.load(self._start)
        shared = request.group("shared")
        if found is None and not shared:
            raise LostStateError("this client has no state of this run, and was sent none.")
        kept = found or Kept(self._start, self._worker.no_answers())
        state, answers = kept.state, kept.answers
        if int(state.step) == int(words["step"]):
            answers = _merged(answers, request.group("answer"))
            if words.get("leave"):
                self.gate.check_leave(bool(shared))
                # Later rounds went on without this client, so its corrections stay as they are.
                heard = any(table.words.any() for table in answers.values())
                new, asked, *_ = self._worker.attempt(state, key, without_the_rest(answers))
                if heard:
                    new = self.gate.settled(state, new, asked, kept.release)
                state, answers = new, self._worker.no_answers()
        if shared:
            state, answers = with_shared(self.solver, state, shared), self._worker.no_answers()
            state = kept.trail.followed(state)
        if words.get("reset"):
            state, answers = forget_own(self.solver, state), self._worker.no_answers()
        kept = Kept(state, answers, int(words["turn"]), kept.release, kept.trail)
        return self._go_on(shelf, words, key, kept)

    def _sum(self, shelf: Shelf, request: Parcel, sums: Sums) -> Parcel:
        """One of the three messages of a secure sum."""
        words, number = request.words, int(request.words["sums"])
        if words["phase"] == "seal":
            peers = {int(i): as_bytes(key) for i, key in request.group("peer").items()}
            return self.gate.sealed(sums.begin(number, peers))
        if words["phase"] == "shares":
            arrived = {int(index) for index in str(words["arrived"]).split(",")}
            return self.gate.sealed(sums.shares(number, arrived))
        closed, enough = sums.closed(number, request.arrays)
        said = {f"closed:{other}": np.ones((), bool) for other in closed}
        if not enough:
            # No vector leaves, and no privacy is spent.
            return self.gate.sealed(said)
        kept = shelf.load(self._start)
        if kept is None:
            raise LostStateError("this client has no state of this run, and was sent none.")
        key = jax.random.key(int(words["seed"]))
        _, asked, used, answers = self._worker.attempt(kept.state, key, kept.answers)
        draft = Draft(kept.state, {}, False, asked, used, answers, number)
        release = self.gate.release(draft, kept.release)
        shelf.save(dataclasses.replace(kept, answers=answers, release=release))
        vectors = self.gate.vectors(draft, release)
        masked = sums.masked(number, request.arrays, vectors)
        return self.gate.sealed({f"masked:{name}": part for name, part in masked.items()} | said)

    def _go_on(
        self, shelf: Shelf, words: Mapping[str, Word], key: PRNGKeyArray, kept: Kept
    ) -> Parcel:
        """Makes outer steps as far as the answers reach, and replies with the next questions."""
        state, answers, release = kept.state, kept.answers, kept.release
        models: dict[int, State] = {}
        asked, used, last = None, dict.fromkeys(TABLES, 0), int(words["last"])
        pausing = False

        def report() -> None:
            step = int(state.step)
            if step % int(words["every"]) == 0 or step == last:
                models[step] = state

        if 0 <= int(words["step"]) < int(state.step):
            # The client has used these answers before, and its reply did not reach the server.
            report()
        while int(state.step) < last:
            kept.trail.note(state)
            pausing = bool(words.get("pause")) and not any(t.words.any() for t in answers.values())
            if pausing:
                break
            new, asked, used, answers = self._worker.attempt(state, key, answers)
            if not complete(used, answers):
                break
            new = self.gate.settled(state, new, asked, release)
            state, answers, asked = new, self._worker.no_answers(), None
            report()
        if int(state.step) >= last:
            run_ended.set()
        draft = Draft(state, models, pausing, asked, used, answers)
        release = self.gate.release(draft, release)
        shelf.save(Kept(state, answers, kept.exchange, release, kept.trail))
        return self.gate.reply(draft, release)


def _merged(answers: Tables, given: dict[str, np.ndarray]) -> Tables:
    """The tables with the answers `table.row` that have arrived."""
    merged = dict(answers)
    for name, value in given.items():
        table, row = name.split(".")
        old, index = merged[table], int(row)
        count = max(len(old.words), index + 2)
        if count > 1 << 20:
            raise ValueError(f"an answer has the row {index}, more than a step can ask for.")
        values = np.zeros((count, old.values.shape[1]), old.values.dtype)
        words = np.zeros(count, np.int32)
        values[: len(old.words)], words[: len(old.words)] = old.values, old.words
        values[index], words[index] = value, KNOWN
        merged[table] = Table(values, words)
    return merged
