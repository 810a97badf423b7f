"""The only outer loop: compiled chunks of outer steps, and between them what people want to see."""

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.checkpoint import Checkpoints, fingerprint, is_key
from aipod.cost import Counts
from aipod.problem import Bilevel
from aipod.progress import Front, Progress, front_for
from aipod.solution import DivergedError, History, Ledger, Result, Solution, scalar_columns
from aipod.solvers import Alternating, State

# Rows that one chunk can record before it returns to Python.
_ROWS = 256
# Seconds between two returns to Python: short for eyes and Ctrl-C, long against their own cost.
_CHUNK_SECONDS = 0.5
# Counts inside a chunk are 32-bit; a limit above this is no limit for one chunk.
_NO_LIMIT = 2**30

Record = Callable[[PyTree, PyTree], Any]


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


class _Limits(eqx.Module):
    """Where a chunk must end. Arrays, so that a change of mind compiles nothing anew."""

    end: Array
    final: Array
    every: Array
    projections: Array
    tolerance: dict[str, Array]


class _Chunk(eqx.Module):
    """What a chunk carries along, and returns."""

    state: State
    rows: dict[str, Array]
    count: Array
    finite: Array
    culprit: Array
    converged: Array


_QUANTITIES = ("x", "y", "the lower level's correction", "the adjoint", "the upper optimiser")


def _parts(state: State) -> tuple[PyTree, ...]:
    return state.x, state.y, state.lower, state.adjoint, state.upper


def _finite_parts(state: State) -> Array:
    """For each of `_QUANTITIES` whether it is finite."""

    def finite(tree: PyTree) -> Array:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        checks = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
        return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)

    return jnp.stack([finite(part) for part in _parts(state)])


def _measure(record: Record | None, state: State) -> dict[str, Array]:
    counts = state.counts
    row: dict[str, Any] = {"step": state.step}
    row |= {field.name: getattr(counts, field.name) for field in dataclasses.fields(Ledger)}
    if state.curvature is not None:
        row["curvature"] = state.curvature.estimate
    metrics = {} if record is None else scalar_columns(record(state.x, state.y))
    if taken := set(metrics) & ({*row, "samples"}):
        raise ValueError(f"record(x, y) returns {sorted(taken)}, which solve itself records.")
    return row | {name: jnp.asarray(value) for name, value in metrics.items()}


def _run_chunk(
    problem: Bilevel,
    solver: Alternating,
    record: Record | None,
    state: State,
    key: PRNGKeyArray,
    limits: _Limits,
) -> _Chunk:
    """Outer steps until a limit: a loop over rows to record, around a loop over steps."""

    def spent(state: State) -> Array:
        return state.counts.projections >= limits.projections

    def step_once(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        old, _, _ = carry
        new = solver.traced_step(problem, old, key)
        parts = _finite_parts(new)
        finite = jnp.all(parts)
        # The last finite state survives, whatever the next one turned into.
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return kept, finite, jnp.argmin(parts).astype(jnp.int32)

    def to_next_row(chunk: _Chunk) -> _Chunk:
        target = jnp.minimum(limits.end, (chunk.state.step // limits.every + 1) * limits.every)

        def going(carry: tuple[State, Array, Array]) -> Array:
            return (carry[0].step < target) & carry[1] & ~spent(carry[0])

        start = (chunk.state, chunk.finite, chunk.culprit)
        state, finite, culprit = jax.lax.while_loop(going, step_once, start)
        on_grid = state.step % limits.every == 0
        last = (state.step == limits.final) | spent(state) | ~finite
        due = (on_grid | last) & (state.step > chunk.state.step)
        rows, converged = jax.lax.cond(due, write, lambda c, s: (c.rows, c.converged), chunk, state)
        return _Chunk(state, rows, chunk.count + due, finite, culprit, converged)

    def write(chunk: _Chunk, state: State) -> tuple[dict[str, Array], Array]:
        row = _measure(record, state)
        rows = {name: buffer.at[chunk.count].set(row[name]) for name, buffer in chunk.rows.items()}
        within = [row[name] <= value for name, value in limits.tolerance.items()]
        return rows, jnp.all(jnp.stack(within)) if within else jnp.asarray(False)

    def going(chunk: _Chunk) -> Array:
        live = (chunk.state.step < limits.end) & ~spent(chunk.state)
        return live & chunk.finite & ~chunk.converged & (chunk.count < _ROWS)

    shapes = jax.eval_shape(lambda s: _measure(record, s), state)
    rows = {name: jnp.zeros((_ROWS, *s.shape), s.dtype) for name, s in shapes.items()}
    if unknown := set(limits.tolerance) - set(rows):
        raise ValueError(
            f"Stop(tolerance=) names {sorted(unknown)}, but only {sorted(rows)} are recorded: let "
            "record(x, y) return it."
        )
    yes, no = jnp.asarray(True), jnp.asarray(False)
    # Fresh counts in each chunk: 32 bits then last, and Python keeps the totals.
    state = eqx.tree_at(lambda s: s.counts, state, Counts.zero())
    chunk = _Chunk(state, rows, jnp.zeros((), jnp.int32), yes, jnp.zeros((), jnp.int32), no)
    return jax.lax.while_loop(going, to_next_row, chunk)


def _column_order(rows: Mapping[str, Any]) -> list[str]:
    """The counts first, then the metrics; compiled dictionaries come back sorted by name."""
    first = ["step", *(field.name for field in dataclasses.fields(Ledger)), "samples"]
    return first + [name for name in rows if name not in first]


class _Program:
    """The compiled chunk. Arrays that user functions captured become its arguments as well.

    Captured arrays would otherwise be constants of the program, which costs compile time and
    memory in proportion to the data.
    """

    def __init__(self, static: PyTree, arguments: tuple[PyTree, ...]) -> None:
        def chunk(arrays: PyTree, state: State, key: PRNGKeyArray, limits: _Limits) -> _Chunk:
            problem, solver, record = eqx.combine(arrays, static)
            return _run_chunk(problem, solver, record, state, key, limits)

        closed, shapes = jax.make_jaxpr(chunk, return_shape=True)(*arguments)

        def flat(captured: list[Array], *leaves: Array) -> list[Array]:
            return jax.core.eval_jaxpr(closed.jaxpr, captured, *leaves)

        self.captured = closed.consts
        self._structure = jax.tree.structure(shapes)
        leaves = jax.tree.leaves(arguments)
        self.compiled = jax.jit(flat).lower(self.captured, *leaves).compile()

    def __call__(self, *arguments: PyTree) -> _Chunk:
        leaves = jax.tree.leaves(arguments)
        return jax.tree.unflatten(self._structure, self.compiled(self.captured, *leaves))


# The newest programs, so that the next seed of a problem compiles nothing. Few, since each keeps
# alive what the user's functions captured.
_PROGRAMS: collections.OrderedDict[Any, _Program] = collections.OrderedDict()
_PROGRAMS_KEPT = 4


def _program_for(static: PyTree, arguments: tuple[PyTree, ...]) -> _Program:
    """The program for these functions and these shapes, compiled unless it is at hand."""
    leaves, structure = jax.tree.flatten(static)
    avals = tuple(jax.typeof(leaf) for leaf in jax.tree.leaves(arguments))
    name = (structure, tuple(leaves), jax.tree.structure(arguments), avals, _ROWS)
    try:
        found = _PROGRAMS.pop(name, None)
    except TypeError:  # a part that cannot be hashed: nothing to find it by
        return _Program(static, arguments)
    _PROGRAMS[name] = found or _Program(static, arguments)
    while len(_PROGRAMS) > _PROGRAMS_KEPT:
        _PROGRAMS.popitem(last=False)
    return _PROGRAMS[name]


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
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == (2,):
        key = jax.random.wrap_key_data(key)  # made by jax.random.PRNGKey, JAX's older kind
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

    def limits(self, end: int) -> _Limits:
        left = _NO_LIMIT
        if self.stop.projections is not None:
            left = min(left, self.stop.projections - self.ledger.projections)
        tolerance = self.stop.tolerance or {}
        return _Limits(
            end=jnp.asarray(end, jnp.int32),
            final=jnp.asarray(self.steps, jnp.int32),
            every=jnp.asarray(self.every, jnp.int32),
            projections=jnp.asarray(left, jnp.int32),
            tolerance={name: jnp.asarray(value, float) for name, value in tolerance.items()},
        )

    def to_the_end(self, front: Any) -> Solution:
        step = int(self.state.step)
        result = None if step < self.steps else Result.completed
        size = 1
        arrays, static = eqx.partition((self.problem, self.solver, self.record), eqx.is_array)
        if result is None:
            arguments = (arrays, self.state, self.key, self.limits(step))
            program = _program_for(static, arguments)
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

    def absorb(self, chunk: _Chunk) -> Result | None:
        """Takes over what a chunk did; a result when it was the last one."""
        count = int(chunk.count)
        rows = {name: np.asarray(value[:count]) for name, value in chunk.rows.items()}
        for field in dataclasses.fields(Ledger):
            rows[field.name] = rows[field.name].astype(np.int64) + getattr(self.ledger, field.name)
        rows["samples"] = rows["upper_samples"] + rows["lower_samples"]
        rows["step"] = rows["step"].astype(np.int64)
        self.history = self.history.extended({k: rows[k] for k in _column_order(rows)})
        self.clock = np.concatenate([self.clock, np.full(count, self.elapsed)])
        self.ledger = self.ledger.plus(chunk.state.counts)
        self.state = eqx.tree_at(lambda s: s.counts, chunk.state, Counts.zero())
        if not bool(chunk.finite):
            self.culprit = _QUANTITIES[int(chunk.culprit)]
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
                self.history.last(),
            )
        )

    def solution(self, result: Result) -> Solution:
        step = int(self.state.step)
        totals = {k: min(v, 2**31 - 1) for k, v in dataclasses.asdict(self.ledger).items()}
        counts = Counts(**{name: jnp.asarray(total, jnp.int32) for name, total in totals.items()})
        state = eqx.tree_at(lambda s: s.counts, self.state, counts)
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
