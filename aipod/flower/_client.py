"""A client's answer to one request, and what it keeps on disk between two requests."""

import re
from collections.abc import Mapping
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from aipod._misc.digest import digest_text
from aipod._misc.files import narrow_files, private_folder
from aipod.algorithms import Alternating, State
from aipod.flower._local import Client, Worker, complete, initial_state, without_the_rest
from aipod.flower._mailbox import KNOWN, TABLES, Table, Tables, ready
from aipod.flower._parcel import Parcel, Word
from aipod.flower._parts import forget_own, model_leaves, shared_leaves, with_shared
from aipod.flower._privacy import Guard, Privacy
from aipod.solving import Checkpoints


def solver_digest(solver: Alternating) -> str:
    """Differs between solvers with different arguments; the same on server and clients."""
    text = eqx.tree_pformat(solver, short_arrays=False)
    return digest_text(text, digits=16, keep_at=False)


class Session:
    """One client of one federation, with its folder on disk.

    Everything that the next request needs is written before a reply leaves. So the process may end
    after any message, and a crash loses at most the reply.
    """

    def __init__(
        self, client: Client, solver: Alternating, folder: Path, privacy: Privacy | None = None
    ) -> None:
        self.client, self.solver, self.folder = client, solver, folder
        self._privacy = privacy
        self._guard: Guard | None = None
        if privacy is not None:
            privacy.check(solver)
        self._start = initial_state(solver, client.x, client.y)
        problem = client.problem()
        problem.check(self._start.x, self._start.y)
        self._worker = Worker(solver, problem, self._start)

    def handle(self, request: Parcel) -> Parcel:
        """The reply to one request."""
        run = str(request.words["run"])
        if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run):
            raise ValueError(f"{run!r} is not the name of a run: use letters, digits, - and _.")
        place = private_folder(private_folder(self.folder / run) / f"client-{self.client.index}")
        store = Checkpoints(place, {"run": run, "solver": solver_digest(self.solver)})
        if "turn" not in request.words:
            return self._hello(store)
        if self._privacy is not None:
            self._guard = Guard(self._privacy, self.solver, place)
        try:
            return self._exchange(store, request)
        finally:
            narrow_files(place)

    def _hello(self, store: Checkpoints) -> Parcel:
        found = self._load(store)
        return Parcel(
            {
                "index": int(self.client.index),
                "clients": int(self.client.clients),
                "weight": float(self.client.weight),
                "solver": solver_digest(self.solver),
                "step": -1 if found is None else int(found[0].step),
                "exchange": -1 if found is None else found[2],
            }
        )

    def _load(self, store: Checkpoints) -> tuple[State, Tables, int] | None:
        found = store.load(self._start)
        if found is None:
            return None
        state, columns, extra = found
        answers = {
            name: Table(columns[f"{name} values"], columns[f"{name} words"]) for name in TABLES
        }
        return state, answers, int(extra["exchange"])

    def _save(self, store: Checkpoints, state: State, answers: Tables, exchange: int) -> None:
        columns = {}
        for name, table in answers.items():
            columns[f"{name} values"] = np.asarray(table.values)
            columns[f"{name} words"] = np.asarray(table.words)
        store.save(state, columns, {"exchange": exchange})

    def _exchange(self, store: Checkpoints, request: Parcel) -> Parcel:
        words = request.words
        key = jax.random.key(int(words["seed"]))
        found = self._load(store)
        shared = request.group("shared")
        if found is None and not shared:
            return Parcel({"error": "it has lost its state"})
        state, answers, _ = found or (self._start, self._worker.no_answers(), -1)
        if int(state.step) == int(words["step"]):
            answers = _merged(answers, request.group("answer"))
            if words.get("leave"):
                # Later rounds went on without this client, so its corrections stay as they are.
                heard = any(table.words.any() for table in answers.values())
                new, asked, *_ = self._worker.attempt(state, key, without_the_rest(answers))
                if self._guard is not None and heard:
                    new = self._guard.settled(state, new, asked)
                state, answers = new, self._worker.no_answers()
        if shared:
            state, answers = with_shared(self.solver, state, shared), self._worker.no_answers()
        if words.get("reset"):
            state, answers = forget_own(self.solver, state), self._worker.no_answers()
        return self._go_on(store, words, key, state, answers)

    def _go_on(
        self,
        store: Checkpoints,
        words: Mapping[str, Word],
        key: PRNGKeyArray,
        state: State,
        answers: Tables,
    ) -> Parcel:
        """Makes outer steps as far as the answers reach, and replies with the next questions."""
        arrays: dict[str, np.ndarray] = {}
        asked, last = None, int(words["last"])
        pausing = False

        def report() -> None:
            step = int(state.step)
            if step % int(words["every"]) == 0 or step == last:
                # What a client's adjoint has seen was never covered by noise: it stays here.
                shown = state if self._guard is None else forget_own(self.solver, state)
                model = model_leaves(self.solver, state, shown.watch)
                arrays.update({f"model@{step}:{name}": leaf for name, leaf in model.items()})

        if 0 <= int(words["step"]) < int(state.step):
            # The client has used these answers before, and its reply did not reach the server.
            report()
        while int(state.step) < last:
            pausing = bool(words.get("pause")) and not any(t.words.any() for t in answers.values())
            if pausing:
                break
            new, asked, used, answers = self._worker.attempt(state, key, answers)
            if not complete(used, answers):
                break
            if self._guard is not None:
                new = self._guard.settled(state, new, asked)
            state, answers, asked = new, self._worker.no_answers(), None
            report()
        self._save(store, state, answers, int(words["turn"]))
        if pausing:
            arrays |= {
                f"shared:{name}": leaf for name, leaf in shared_leaves(self.solver, state).items()
            }
        if asked is not None:
            open_questions = ready(asked, used, answers)
            if self._guard is not None:
                open_questions = self._guard.protected(state, open_questions)
            arrays |= _questions(open_questions)
        return Parcel({"step": int(state.step)}, arrays)


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


def _questions(tables: Tables) -> dict[str, np.ndarray]:
    """The questions as arrays named `asked:table.row.kind`."""
    return {
        f"asked:{name}.{row}.{int(table.words[row])}": table.values[row]
        for name, table in tables.items()
        for row in np.flatnonzero(table.words)
    }
