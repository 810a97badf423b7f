"""What the server keeps of a run: metrics, the ledger, and checkpoints to resume from."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod.algorithms import Alternating, State
from aipod.flower._parts import with_model
from aipod.flower._progress import Owed, Progress
from aipod.problem import Bilevel
from aipod.slots import Counts
from aipod.solving import (
    Checkpoints,
    History,
    Ledger,
    Price,
    Result,
    Solution,
    convergence_of,
    scalar_columns,
)

Record = Callable[[PyTree, PyTree], Any]
# Columns besides those of every run: exchanges, and per client the bytes that were sent, received,
# and sent or received for evaluation and for clients that come back.
WIRE = ("exchanges", "wire_up", "wire_down", "wire_aside")
_COUNTS = [field.name for field in dataclasses.fields(Counts)]


class Book:
    """The server's memory of one run.

    - `problem`, `solver`, `state`: the empty problem, and the state that a run starts from.
    - `record`: (x, y) -> metrics of the mean model, which has a client axis of length 1.
    - `traffic`: () -> bytes up, down and aside so far, of all clients together.
    """

    def __init__(
        self,
        problem: Bilevel,
        solver: Alternating,
        state: State,
        record: Record | None,
        folder: str | os.PathLike[str] | None,
        identity: Mapping[str, str],
        traffic: Callable[[], tuple[int, int, int]],
    ) -> None:
        self.problem, self.state = problem, state
        self._solver, self._clients = solver, 1
        self.history, self.ledger = History({}), Ledger()
        self.clock = np.zeros(0)
        self._price = Price.of(problem, state, solver.wire)
        self._record = None if record is None else eqx.filter_jit(record)
        self._checkpoints = None if folder is None else Checkpoints(folder, identity)
        self._counts = np.zeros(len(_COUNTS), np.int32)
        self._traffic, self._traffic_before = traffic, (0, 0, 0)
        self._began, self._elapsed_before = time.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        return self._elapsed_before + time.monotonic() - self._began

    @property
    def traffic(self) -> tuple[int, ...]:
        """Bytes up, down and aside of the whole run, including what came before a resume."""
        return tuple(a + b for a, b in zip(self._traffic_before, self._traffic(), strict=True))

    def add(self, step: int, model: Mapping[str, np.ndarray], progress: Progress) -> None:
        """Adds a row to the history, from the mean of the clients' models after a step."""
        if step <= int(self.state.step):
            return
        state = with_model(self._solver, self.state, model)
        self._clients = progress.clients or 1
        self.state = eqx.tree_at(lambda s: s.step, state, jnp.asarray(step, jnp.int32))
        # Counts have 32 bits and wrap around; so does their difference.
        with np.errstate(over="ignore"):
            spent = (model["counts"] - self._counts).astype(np.int64) % 2**32
        self._counts = np.array(model["counts"])
        row: dict[str, Any] = {"step": step} | dict(zip(_COUNTS, spent, strict=True))
        if "curvature" in model:
            row["curvature"] = model["curvature"]
        if self._record is not None:
            row |= scalar_columns(self._record(self.state.x, self.state.y))
        clients = max(len(progress.weights), 1)
        up, down, aside = (count / clients for count in self.traffic)
        row |= {
            "exchanges": progress.exchange,
            "wire_up": up,
            "wire_down": down,
            "wire_aside": aside,
        }
        rows = {name: np.asarray(value)[None] for name, value in row.items()}
        self.history = self.history.extended(self._price.rows(rows, self.ledger))
        counts = Counts(*spent)
        self.ledger = self._price.total(counts, self.ledger)
        self.clock = np.append(self.clock, self.elapsed)

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint with everything that a new server needs to go on."""
        if self._checkpoints is None:
            return
        columns = {f"history:{name}": value for name, value in self.history.items()}
        columns |= {"clock": self.clock, "counts": self._counts}
        columns |= {f"answer:{name}": value for name, value in progress.answers.items()}
        for index, known in progress.known.items():
            columns |= {f"known-{index}:{name}": value for name, value in known.items()}
        for index, owed in progress.owed.items():
            columns |= {f"owed-{index}:{name}": v for name, v in owed.answers.items()}
        extra = {
            "progress": {
                "run": progress.run,
                "step": progress.step,
                "exchange": progress.exchange,
                "rounds": progress.rounds,
                "clients": progress.clients,
                "counted": sorted(progress.counted),
                "weights": list(progress.weights.items()),
                "owed": [(i, owed.step, owed.exchange) for i, owed in progress.owed.items()],
            },
            "recorded": int(self.state.step),
            "ledger": dataclasses.asdict(self.ledger),
            "traffic": self.traffic,
            "elapsed": self.elapsed,
        }
        # Checkpoints are named after the step; here the exchange takes its place.
        named = eqx.tree_at(lambda s: s.step, self.state, jnp.asarray(progress.exchange, jnp.int32))
        self._checkpoints.save(named, columns, extra)

    def refuse_overwriting(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.refuse_overwriting()

    def load(self) -> Progress | None:
        """Restores the newest checkpoint; None when there is none."""
        found = None if self._checkpoints is None else self._checkpoints.load(self.state)
        if found is None:
            return None
        state, columns, extra = found
        groups: dict[str, dict[str, np.ndarray]] = {}
        for full, value in columns.items():
            group, _, name = full.partition(":")
            groups.setdefault(group, {})[name] = value
        step = jnp.asarray(extra["recorded"], jnp.int32)
        self.state = eqx.tree_at(lambda s: s.step, state, step)
        self.history = History(groups.get("history", {}))
        self.clock, self._counts = columns["clock"], columns["counts"]
        self.ledger = Ledger(**extra["ledger"])
        self._traffic_before = tuple(extra["traffic"])
        self._elapsed_before = extra["elapsed"]
        given = extra["progress"]
        self._clients = given["clients"] or 1
        return Progress(
            run=given["run"],
            step=given["step"],
            exchange=given["exchange"],
            rounds=given["rounds"],
            clients=given["clients"],
            answers=groups.get("answer", {}),
            owed={i: Owed(s, e, groups.get(f"owed-{i}", {})) for i, s, e in given["owed"]},
            counted=set(given["counted"]),
            known={int(g[6:]): rows for g, rows in groups.items() if g.startswith("known-")},
            weights=dict(given["weights"]),
        )

    def solution(self, result: Result, message: str) -> Solution:
        """The run as `aipod.solve` would give it back; x and y have a client axis of length 1."""
        return Solution(
            result=result,
            message=message,
            history=self.history,
            ledger=self.ledger,
            kept=jax.tree.map(jnp.asarray, self.state),
            seconds=self.clock,
            problem=self.problem,
            convergence=convergence_of(self._solver, self.state, self._clients),
        )
