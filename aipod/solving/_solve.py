"""The only outer loop: compiled chunks of outer steps, and between them what people want to see."""

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import as_key, is_key
from aipod._misc.tree import to_device
from aipod.algorithms._alternating import Alternating, State
from aipod.problem._bilevel import Bilevel
from aipod.slots._cost import Counts
from aipod.solving._checkpoint import Checkpoints, fingerprint
from aipod.solving._chunk import QUANTITIES, Chunk, Limits, Record, program_for
from aipod.solving._progress import Front, Progress, front_for
from aipod.solving._solution import DivergedError, History, Ledger, Price, Result, Solution

# Seconds between two returns to Python: short for eyes and Ctrl-C, long against their own cost.
_CHUNK_SECONDS = 0.5
# Counts inside a chunk are 32-bit; a limit above this is no limit for one chunk.
_NO_LIMIT = 2**30


@dataclasses.dataclass(frozen=True)
class Stop:
    """When a run ends; whichever comes first.

    - `steps`: outer steps.
    - `seconds`: wall-clock time after compiling, looked at about twice a second.
    - `projections`: projections of all kinds together.
    - `tolerance`: {metric: value}; ends at the first recorded step where every named metric that
        `record` returns is at most its value.

    !!! example
        ```python
        stop = aipod.Stop(seconds=60, tolerance={"stationarity": 1e-6})
        ```
    """

    steps: int | None = None
    seconds: float | None = None
    projections: int | None = None
    tolerance: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "seconds", "projections"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Stop: {name} must be positive, got {value}.")
        if self.tolerance is not None and not isinstance(self.tolerance, Mapping):
            raise ValueError("Stop: tolerance names the metric, as in {'stationarity': 1e-6}.")


def _check_arguments(
    problem: Any, solver: Any, key: Any, steps: int | None, every: int, record: Any
) -> int:
    """The number of steps, when everything is as it should be."""
    if not isinstance(problem, Bilevel):
        raise ValueError(f"problem must be an aipod.Bilevel, got {type(problem).__name__}.")
    if not isinstance(solver, Alternating):
        raise ValueError(
            f"solver must be one such as aipod.AiPOD(upper_lr=0.01), got {type(solver).__name__}."
        )
    if not is_key(key) or key.shape != ():
        raise ValueError("key must be one JAX key, as in key=jax.random.key(0).")
    if steps is None:
        raise ValueError("say how many outer steps to make, as in steps=1000.")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps < 2**31:
        raise ValueError(f"steps must be a whole number, at least 1, got {steps!r}.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}.")
    if record is not None and not callable(record):
        raise ValueError("record must be a function (x, y) -> {name: value}.")
    return steps


def solve(
    problem: Bilevel,
    solver: Alternating,
    x0: PyTree,
    y0: PyTree,
    steps: int | None = None,
    *,
    key: PRNGKeyArray,
    record: Record | None = None,
    every: int = 10,
    progress: bool | Front = False,
    stop: Stop = Stop(),
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    throw: bool = True,
) -> Solution:
    """Runs a solver on a problem.

    **Arguments:**

    - `problem`, `solver`: a `Bilevel`, and one of the solvers, such as `AiPOD`.
    - `x0`, `y0`: where to start, pytrees; x0 is projected on the upper set.
    - `steps`: outer steps to make in all, also when resuming.
    - `key`: all randomness comes from it and the step index: how a run is recorded, cut into
        pieces or resumed changes nothing in it.
    - `record`: (x, y) -> dictionary of arrays, compiled along and called on the iterates as they
        are; it becomes columns of `history`.
    - `every`: record every so many steps, and the last one.
    - `progress`: True for a bar on a terminal (silent elsewhere), or a function of `Progress`.
    - `stop`: a `Stop` with further reasons to end.
    - `checkpoint`: a folder for checkpoints, written every `checkpoint_seconds` and at the end.
    - `resume`: go on from the newest whole checkpoint there, if there is one.
    - `throw`: raise `DivergedError` when an iterate becomes NaN or infinite; otherwise return the
        last finite state with `Result.diverged`.

    !!! example
        ```python
        solution = aipod.solve(
            problem,
            aipod.EAiPOD(upper_lr=0.02, lower_lr=0.01, lower_prob=0.3),
            x0,
            y0,
            steps=1000,
            key=jax.random.key(0),
            record=lambda x, y: {"stationarity": aipod.stationarity(problem, x)},
        )
        ```
    """
    steps = min((s for s in (steps, stop.steps) if s is not None), default=None)
    key = as_key(key)
    steps = _check_arguments(problem, solver, key, steps, every, record)
    if resume and checkpoint is None:
        raise ValueError("resume=True needs checkpoint=, the folder to go on from.")
    run = _Run(problem, solver, solver.init(problem, x0, y0), key, record, every, steps, stop)
    if checkpoint is not None:
        run.open_checkpoints(checkpoint, checkpoint_seconds, resume)
    front = front_for(progress)
    try:
        solution = run.to_the_end(front)
    finally:
        front.close()
    if throw and solution.result is Result.diverged:
        raise DivergedError(solution)
    return solution


class _Run:
    """One run in progress: what is known between chunks."""

    def __init__(
        self,
        problem: Bilevel,
        solver: Alternating,
        state: State,
        key: PRNGKeyArray,
        record: Record | None,
        every: int,
        steps: int,
        stop: Stop,
    ) -> None:
        self.problem, self.solver, self.record = problem, solver, record
        self.state, self.key = state, key
        self.every, self.steps, self.stop = every, steps, stop
        self.history, self.ledger = History({}), Ledger()
        self.price = Price.of(problem, state, solver.wire)
        self.clock = np.zeros(0)
        self.elapsed = 0.0
        self.checkpoints: Checkpoints | None = None
        self.checkpoint_seconds = float("inf")
        self.saved_at = 0.0
        self.culprit = ""

    def open_checkpoints(
        self, folder: str | os.PathLike[str], seconds: float, resume: bool
    ) -> None:
        identity = fingerprint(self.problem, self.solver, self.state, self.key)
        self.checkpoints = Checkpoints(folder, identity)
        self.checkpoint_seconds = seconds
        if not resume:
            self.checkpoints.refuse_overwriting()
            return
        found = self.checkpoints.load(self.state)
        if found is None:
            return
        self.state, columns, extra = found
        self.clock = columns.pop("_clock")
        self.history = History(columns)
        self.ledger = Ledger(**extra["ledger"])
        self.elapsed = self.saved_at = extra["elapsed"]

    def save(self) -> None:
        if self.checkpoints is None:
            return
        columns = {**self.history, "_clock": self.clock}
        extra = {"ledger": dataclasses.asdict(self.ledger), "elapsed": self.elapsed}
        self.checkpoints.save(self.state, columns, extra)
        self.saved_at = self.elapsed

    def limits(self, end: int) -> Limits:
        left = _NO_LIMIT
        if self.stop.projections is not None:
            left = min(left, self.stop.projections - self.ledger.projections)
        tolerance = self.stop.tolerance or {}
        return Limits(
            end=to_device(end, np.int32),
            final=to_device(self.steps, np.int32),
            every=to_device(self.every, np.int32),
            projections=to_device(left, np.int32),
            tolerance={name: to_device(value) for name, value in tolerance.items()},
        )

    def to_the_end(self, front: Any) -> Solution:
        step = int(self.state.step)
        result = None if step < self.steps else Result.completed
        size = 1
        arrays, static = eqx.partition((self.problem, self.solver, self.record), eqx.is_array)
        if result is None:
            arguments = (arrays, self.state, self.key, self.limits(step))
            program = program_for(static, arguments)
        while result is None:
            try:
                began, before = time.perf_counter(), step
                limits = self.limits(min(self.steps, step + size))
                chunk = program(arrays, self.state, self.key, limits)
                jax.block_until_ready(chunk.state)
                took = time.perf_counter() - began
                self.elapsed += took
                result = self.absorb(chunk)
                step = int(self.state.step)
                rate = (step - before) / max(took, 1e-9)
                self.report(front, rate)
                # Towards chunks of the wanted duration, not faster than eightfold: the first
                # steps of a program are slower than the rest.
                wanted = int(rate * min(_CHUNK_SECONDS, self.checkpoint_seconds))
                size = max(1, min(wanted, 8 * size, _NO_LIMIT))
                if self.elapsed - self.saved_at >= self.checkpoint_seconds:
                    self.save()
            except KeyboardInterrupt:
                result = Result.interrupted
        self.save()
        return self.solution(result)

    def absorb(self, chunk: Chunk) -> Result | None:
        """Takes over what a chunk did; a result when it was the last one."""
        count = int(chunk.count)
        # Cut on the host: JAX would compile a slice for every new count.
        rows = {name: np.asarray(value)[:count] for name, value in chunk.rows.items()}
        self.history = self.history.extended(self.price.rows(rows, self.ledger))
        self.clock = np.concatenate([self.clock, np.full(count, self.elapsed)])
        self.ledger = self.price.total(chunk.state.counts, self.ledger)
        self.state = eqx.tree_at(lambda s: s.counts, chunk.state, Counts.zero())
        if not bool(chunk.finite):
            self.culprit = QUANTITIES[int(chunk.culprit)]
            return Result.diverged
        if bool(chunk.converged):
            return Result.converged
        limit = self.stop.projections
        if limit is not None and self.ledger.projections >= limit:
            return Result.out_of_projections
        if int(self.state.step) >= self.steps:
            return Result.completed
        if self.stop.seconds is not None and self.elapsed >= self.stop.seconds:
            return Result.out_of_time
        return None

    def report(self, front: Any, rate: float) -> None:
        front(
            Progress(
                int(self.state.step),
                self.steps,
                self.elapsed,
                rate,
                self.ledger,
                self.history,
            )
        )

    def solution(self, result: Result) -> Solution:
        step = int(self.state.step)
        state = eqx.tree_at(lambda s: s.counts, self.state, Counts.zero())
        message = f"{result.value} ({step:,} outer steps)"
        if result is Result.diverged:
            message = (
                f"diverged at outer step {step + 1}: {self.culprit} became NaN or infinite; the "
                f"state after step {step} is kept. {self.solver.remedy()}"
            )
        return Solution(
            x=state.x,
            y=state.y,
            result=result,
            message=message,
            history=self.history,
            ledger=self.ledger,
            state=state,
            seconds=self.clock,
            problem=self.problem,
        )
