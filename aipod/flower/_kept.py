"""What a client keeps on its disk between two requests."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aipod.algorithms import State
from aipod.flower._draws import Trail
from aipod.flower._gate import Release
from aipod.flower._mailbox import TABLES, Table, Tables
from aipod.solving import Checkpoints


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a client keeps between two requests.

    - `exchange`: the number of the exchange that it answered last.
    - `release`: what left it last, with privacy.
    - `trail`: what it had drawn before its newest steps, by epochs.
    """

    state: State
    answers: Tables
    exchange: int = -1
    release: Release | None = None
    trail: Trail = dataclasses.field(default_factory=Trail)


class Shelf:
    """A client's folder of one run."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self._folder = folder
        self._store = Checkpoints(folder, identity)

    def load(self, like: State) -> Kept | None:
        """What was saved last, in the structure of `like`; None when there is nothing whole."""
        found = self._store.load(like)
        if found is None:
            return None
        state, columns, extra = found
        answers = {
            name: Table(columns[f"{name} values"], columns[f"{name} words"]) for name in TABLES
        }
        release = None
        if extra.get("release"):
            sent = {n.removeprefix("sent "): v for n, v in columns.items() if n.startswith("sent ")}
            step, digest, number = extra["release"]
            release = Release(int(step), str(digest), sent, int(number))
        return Kept(state, answers, int(extra["exchange"]), release, Trail.read(columns))

    def save(self, kept: Kept) -> None:
        columns = kept.trail.columns()
        for name, table in kept.answers.items():
            columns[f"{name} values"] = np.asarray(table.values)
            columns[f"{name} words"] = np.asarray(table.words)
        extra: dict[str, Any] = {"exchange": kept.exchange}
        if kept.release is not None:
            columns |= {f"sent {name}": value for name, value in kept.release.values.items()}
            extra["release"] = [kept.release.step, kept.release.digest, kept.release.number]
        # The newest step is what is loaded. After the server has sent a client back to an earlier
        # one, what it had computed since must not come up again.
        for path in self._folder.glob("step-*.npz"):
            if path.stem > f"step-{int(kept.state.step):012d}":
                path.unlink(missing_ok=True)
        self._store.save(kept.state, columns, extra)
