"""One run in progress: what is known between two chunks."""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from aipod._misc.functions import release
from aipod._misc.tree import to_device
from aipod.algorithms import Alternating, State
from aipod.problem import Bilevel
from aipod.slots import Counts
from aipod.solving._callbacks import CallbackError, Callbacks
from aipod.solving._checkpoint import CheckpointError, Checkpoints
from aipod.solving._chunk import QUANTITIES, Chunk, Limits, Record, last_finite, measured
from aipod.solving._convergence import Convergence, convergence_of
from aipod.solving._divergence import why_diverged
from aipod.solving._history import History
from aipod.solving._ledger import Ledger, Price
from aipod.solving._mesh import Placement
from aipod.solving._processes import first, here, said_by_first, wait_for_all
from aipod.solving._programs import Program
from aipod.solving._progress import Progress
from aipod.solving._solution import Result, Solution, check_nonempty
from aipod.solving._stop import Stop

# Seconds between returns to Python: often enough for progress and Ctrl-C, rarely enough to be
# cheap.
_CHUNK_SECONDS = 0.5
# Counts inside a chunk are 32-bit; a limit above this is no limit for one chunk.
_NO_LIMIT = 2**30
_CLOCK = "_clock"
_NOT_OK = Convergence(converged=False, reason="the run has failed")


@eqx.filter_jit
def _points(keeping: Any, state: State) -> tuple[Any, Any]:
    return keeping.points(state)


class Books(NamedTuple):
    """Everything that a chunk changes. Replaced as one, so that an interrupt leaves them whole."""

    state: State
    history: History
    ledger: Ledger
    clock: np.ndarray
    elapsed: float


class Run:
    """One run: advances by chunks, keeps books, and saves them."""

    def __init__(
        self,
        problem: Bilevel,
        solver: Alternating,
        placement: Placement,
        state: State,
        key: PRNGKeyArray,
        record: Record | None,
        every: int,
        steps: int,
        stop: Stop,
    ) -> None:
        self.problem, self.solver, self.record, self.key = problem, solver, record, key
        self.every, self.steps, self.stop = every, steps, stop
        self.placement, self.keeping = placement, placement.keeping
        self.books = Books(placement.place(state), History({}), Ledger(), np.zeros(0), 0.0)
        self._price = Price.of(problem, state, solver.wire, solver.upper.wire_back(problem))
        self._checkpoints: Checkpoints | None = None
        self._checkpoint_seconds = float("inf")
        self._saved_at = 0.0
        self._unsaved = ""
        self._culprit = ""
        self.callbacks = Callbacks()

    def open_checkpoints(self, checkpoints: Checkpoints, seconds: float, resume: bool) -> None:
        """Saves into these checkpoints from now on; with `resume` goes on from the newest."""
        self._checkpoints, self._checkpoint_seconds = checkpoints, seconds
        if not resume:
            checkpoints.refuse_overwriting()
            # Before the first checkpoint is written, all have seen that there was none.
            wait_for_all("checkpoints")
            return
        found = checkpoints.load_or_refuse(self.placement.collect(self.books.state))
        wait_for_all("checkpoints")
        if found is None:
            return
        clock = found.columns.pop(_CLOCK)
        self._refuse_other_columns(found.columns)
        ledger, elapsed = Ledger(**found.extra["ledger"]), found.extra["elapsed"]
        state = self.placement.place(found.state)
        self.books = Books(state, History(found.columns), ledger, clock, elapsed)
        self._saved_at = elapsed

    def _refuse_other_columns(self, columns: dict[str, np.ndarray]) -> None:
        """Raises when `record` returns other columns than those of the checkpoint."""
        if not columns:
            return
        row = jax.eval_shape(
            lambda state: measured(self.record, state, self.keeping), self.books.state
        )
        empty = {name: np.zeros((0, *leaf.shape), leaf.dtype) for name, leaf in row.items()}
        now = self._price.rows(empty, Ledger())
        for name in {**columns, **now}:
            old, new = columns.get(name), now.get(name)
            if old is None or new is None or old.shape[1:] != new.shape[1:]:
                raise CheckpointError(
                    f"record(x, y) returns other columns than when the run was saved ({name!r} "
                    "differs): resume with the same record, or start anew in another folder."
                )

    def _save(self) -> None:
        """Writes a checkpoint; where that fails (a full disk), the run goes on without it."""
        if self._checkpoints is None:
            return
        books = self.books
        self._saved_at = books.elapsed
        # All processes take part in collecting, and the first one writes.
        state = self.placement.collect(books.state)
        if not first():
            return
        columns = {**books.history, _CLOCK: books.clock}
        extra = {"ledger": dataclasses.asdict(books.ledger), "elapsed": books.elapsed}
        try:
            self._checkpoints.save(state, columns, extra)
            self._unsaved = ""
        except OSError as error:
            self._unsaved = f" The last checkpoint was not written: {error.strerror or error}."
            warnings.warn(
                f"step {int(books.state.step)} was not saved ({error.strerror or error}); the run "
                "goes on, and older checkpoints are kept.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _limits(self, end: int, final: int | None = None) -> Limits:
        left = _NO_LIMIT
        if self.stop.projections is not None:
            left = min(left, self.stop.projections - self.books.ledger.projections)
        tolerance, patience = self.stop.tolerance or {}, self.stop.patience
        return Limits(
            end=to_device(end, np.int32),
            final=to_device(self.steps if final is None else final, np.int32),
            every=to_device(self.every, np.int32),
            projections=to_device(left, np.int32),
            tolerance={name: to_device(value) for name, value in tolerance.items()},
            patience=None if patience is None else to_device(patience, np.int32),
        )

    def to_the_end(self, front: Any) -> Solution:
        """Makes steps until one of the reasons to stop holds."""
        step = int(self.books.state.step)
        result = None if step < self.steps else Result.completed
        size, program = 1, None
        arrays, static = eqx.partition(
            (self.placement.problem, self.solver, self.record, self.keeping), eqx.is_array
        )
        self.callbacks.begin(self.books.history)
        while result is None:
            try:
                end = min(self.steps, step + size)
                if program is None:
                    limits = self._limits(end)
                    program = Program(static, (arrays, self.books.state, self.key, limits))
                began, before = time.perf_counter(), step
                chunk = self._advanced(functools.partial(program, arrays), end)
                took = said_by_first(time.perf_counter() - began)
                self.books, result = self._after(chunk, took)
                step = int(self.books.state.step)
                rate = (step - before) / max(took, 1e-9)
                self._report(front, rate)
                result = self._called(result)
                # Aim for chunks of the wanted duration, but grow at most eightfold: the first
                # steps of a program are slower than the rest.
                pause = min(_CHUNK_SECONDS, self.callbacks.seconds, self._checkpoint_seconds)
                wanted = int(rate * pause)
                size = max(1, min(wanted, 8 * size, _NO_LIMIT))
                if self.books.elapsed - self._saved_at >= self._checkpoint_seconds:
                    self._save()
            except KeyboardInterrupt:
                result = Result.interrupted
        self._save()
        return self._solution(result)

    def _advanced(self, program: Callable[..., Chunk], end: int) -> Chunk:
        """A chunk to the step `end`, or to the last step after which all numbers are finite."""

        def run(state: State, end: int, final: int) -> Chunk:
            chunk = program(state, self.key, self._limits(end, final))
            return jax.block_until_ready(chunk)

        chunk = run(self.books.state, end, self.steps)
        if bool(chunk.finite):
            return chunk
        kept, failed = last_finite(run, self.books.state, chunk)
        return dataclasses.replace(kept, finite=failed.finite, culprit=failed.culprit)

    def _called(self, result: Result | None) -> Result | None:
        """The result after the callbacks; one that raises leaves everything saved."""
        try:
            ends = self.callbacks.end_the_run(
                int(self.books.state.step), self._points, self.books.history
            )
        except CallbackError as error:
            self._save()
            where = "" if self._checkpoints is None else " The checkpoint holds it: resume=True."
            solution = self._solution(result or Result.interrupted)
            words = f"{error}; the state is kept in .solution.{where}"
            raise CallbackError(words, solution) from error.__cause__
        return Result.stopped if ends and result is None else result

    def _points(self) -> tuple[Any, Any]:
        state = self.placement.collect(self.books.state)
        # Compiled: ten times a second the dispatch of its operations would be seen.
        points = (state.x, state.y) if self.keeping is None else _points(self.keeping, state)
        return release(points)

    def _after(self, chunk: Chunk, took: float) -> tuple[Books, Result | None]:
        """The books after a chunk, and a result when it was the last one."""
        old, count = self.books, int(chunk.count)
        elapsed = old.elapsed + took
        # Cut on the host: JAX would compile a slice for every new count.
        rows = {name: np.asarray(value)[:count] for name, value in here(chunk.rows).items()}
        books = Books(
            state=eqx.tree_at(lambda s: s.counts, chunk.state, Counts.zero()),
            history=old.history.extended(self._price.rows(rows, old.ledger)),
            ledger=self._price.total(chunk.state.counts, old.ledger),
            clock=np.concatenate([old.clock, np.full(count, elapsed)]),
            elapsed=elapsed,
        )
        if not bool(chunk.finite):
            self._culprit = QUANTITIES[int(chunk.culprit)]
            return books, Result.diverged
        if bool(chunk.converged):
            return books, Result.converged
        if bool(chunk.flat):
            return books, Result.plateau
        limit = self.stop.projections
        if limit is not None and books.ledger.projections >= limit:
            return books, Result.out_of_projections
        if int(books.state.step) >= self.steps:
            return books, Result.completed
        if self.stop.seconds is not None and elapsed >= self.stop.seconds:
            return books, Result.out_of_time
        return books, None

    def _report(self, front: Any, rate: float) -> None:
        books = self.books
        step = int(books.state.step)
        front(Progress(step, self.steps, books.elapsed, rate, books.ledger, books.history))

    def _solution(self, result: Result) -> Solution:
        books = self.books
        step = int(books.state.step)
        state = eqx.tree_at(lambda s: s.counts, self.placement.collect(books.state), Counts.zero())
        message = f"{result.value}{self.callbacks.words} ({step:,} outer steps)"
        if result is not Result.diverged:
            try:
                if self.keeping is None:
                    check_nonempty(self.problem.lower_set, state.y, state.x)
            except ValueError as error:
                result, message = Result.infeasible, f"{Result.infeasible.value} {error}"
        else:
            problem, working = self.problem, state
            if self.keeping is not None:
                everyone = dataclasses.replace(self.keeping.everyone(), mesh=None)
                problem, working = everyone.problem(problem, None), everyone.working(state, None)
            cause, remedy = why_diverged(problem, self.solver, working, self.key)
            words = (
                f"diverged at outer step {step + 1}: {self._culprit} became NaN or infinite; the "
                f"state after step {step} is kept.",
                cause,
                remedy,
                self.solver.remedy(),
            )
            message = " ".join(word for word in words if word)
        clients = None if self.keeping is None else self.keeping.clients
        return Solution(
            kept=state,
            keeping=self.keeping,
            result=result,
            message=message + self._unsaved,
            history=books.history,
            ledger=books.ledger,
            seconds=books.clock,
            problem=self.problem,
            convergence=convergence_of(self.solver, state, clients) if result.ok else _NOT_OK,
        )
