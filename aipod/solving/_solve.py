"""`solve`: runs a solver on a problem, in compiled chunks of outer steps."""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import as_key
from aipod._misc.tree import is_concrete
from aipod.algorithms import Alternating
from aipod.problem import Bilevel
from aipod.solving._callbacks import Callback, Callbacks
from aipod.solving._checkpoint import Checkpoints, fingerprint
from aipod.solving._chunk import Record
from aipod.solving._mesh import Placement, adopted
from aipod.solving._processes import first
from aipod.solving._progress import Front, front_for
from aipod.solving._run import Run
from aipod.solving._solution import DivergedError, Result, Solution, X, Y
from aipod.solving._stop import Stop
from aipod.stepsize import check_positive


def solve(
    problem: Bilevel,
    solver: Alternating,
    x0: X,
    y0: Y,
    steps: int | None = None,
    *,
    key: PRNGKeyArray,
    record: Record | None = None,
    every: int = 10,
    progress: bool | Front = False,
    stop: Stop | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    throw: bool = True,
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
) -> Solution[X, Y]:
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
    - `progress`: True for a bar on a terminal or in a notebook (silent elsewhere), or a function of
        `Progress`.
    - `stop`: a `Stop` with further reasons to end.
    - `checkpoint`: a folder for checkpoints, written every `checkpoint_seconds` and at the end. One
        run at a time may use it.
    - `resume`: go on from the newest whole checkpoint there, if there is one.
    - `mesh`: a `jax.sharding.Mesh` to spread the work over: along an axis "clients" the clients of
        a federation, along an axis "batch" the examples of each batch of another problem.
    - `callbacks`: functions (step, x, y, row) that are called in this order after a chunk of steps,
        up to ten times a second. `row` is the newest recorded row, by name. One that returns True,
        or a text with its reason, ends the run. `aipod.callbacks` has some for logging.
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
    stop = Stop() if stop is None else stop
    steps = _check_arguments(problem, solver, steps, every, record, stop, progress)
    key = as_key(key)
    _check_outside(problem, x0, y0, key)
    if resume and checkpoint is None:
        raise ValueError("resume=True needs checkpoint=, the folder to go on from.")
    problem = adopted(problem)
    state, keeping = solver.init_kept(problem, x0, y0)
    placement = Placement.of(problem, keeping, mesh)
    if stop.patience is not None and solver.upper.seen(state.upper) is None:
        raise ValueError(
            "Stop: patience needs an upper slot that answers `seen`, which "
            f"{type(solver.upper).__name__} does not: use Stop(tolerance=) with a record."
        )
    run = Run(problem, solver, placement, state, key, record, every, steps, stop)
    run.callbacks = Callbacks(_checked(callbacks))
    with contextlib.ExitStack() as stack:
        if checkpoint is not None:
            check_positive(checkpoint_seconds, "checkpoint_seconds")
            checkpoints = _checkpoints(run, checkpoint)
            if first():
                stack.enter_context(checkpoints.locked())
            run.open_checkpoints(checkpoints, float(checkpoint_seconds), resume)
        front = front_for(progress if first() else False)
        stack.callback(front.close)
        stack.callback(run.callbacks.close)
        solution = run.to_the_end(front)
        run.callbacks.close(solution)
    if throw and solution.result is Result.diverged:
        raise DivergedError(solution)
    return solution


def _check_arguments(
    problem: Any, solver: Any, steps: Any, every: Any, record: Any, stop: Any, progress: Any
) -> int:
    """The number of steps to make, when the arguments are as they should be."""
    if not isinstance(problem, Bilevel):
        raise ValueError(f"problem must be an aipod.Bilevel, got {type(problem).__name__}.")
    if not isinstance(solver, Alternating):
        raise ValueError(
            f"solver must be one such as aipod.AiPOD(upper_lr=0.01), got {type(solver).__name__}."
        )
    if not isinstance(progress, bool) and not _takes(progress, 1):
        raise ValueError(
            f"progress must be True, False or a function of one report, got {progress!r}."
        )
    if not isinstance(stop, Stop):
        raise ValueError(f"stop must be an aipod.Stop, got {type(stop).__name__}.")
    if record is not None and not _takes(record, 2):
        raise ValueError("record must be a function (x, y) -> {name: value}.")
    for name, value in (("steps", steps), ("every", every)):
        if name == "steps" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ValueError(
                f"{name} must be a whole number, at least 1 and below 2**31, got {value!r}."
            )
    wanted = [count for count in (steps, stop.steps) if count is not None]
    if not wanted:
        raise ValueError("say how many outer steps to make, as in steps=1000.")
    return min(wanted)


def _checked(callbacks: Any) -> tuple[Callback, ...]:
    if callable(callbacks) or not isinstance(callbacks, Sequence):
        raise ValueError("callbacks must be a list of functions, as in callbacks=[my_function].")
    for callback in callbacks:
        if not _takes(callback, 4):
            raise ValueError(
                "each callback must be a function (step, x, y, row), but "
                f"{getattr(callback, '__name__', repr(callback))} is not."
            )
    return tuple(callbacks)


def _takes(function: Any, count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as that can be told."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, written in C
        return callable(function)
    return True


def _check_outside(problem: Bilevel, x0: PyTree, y0: PyTree, key: PRNGKeyArray) -> None:
    # A new array tells whether someone is tracing, also when the arguments themselves are known.
    if not is_concrete((problem, x0, y0, key, jnp.zeros(()))):
        raise ValueError(
            "solve was called inside jit, vmap or grad, but it returns to Python between chunks of "
            "steps: call it outside, or use solver.step(problem, state, key=key) inside."
        )


def _checkpoints(run: Run, folder: Any) -> Checkpoints:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(
            f"checkpoint must be a folder, as in checkpoint='run/state', got {folder!r}."
        )
    # As on one device: a run may go on with another number of them.
    keeping = None if run.keeping is None else dataclasses.replace(run.keeping, mesh=None)
    state = run.placement.collect(run.books.state)
    identity = fingerprint(run.problem, run.solver, keeping, state, run.key)
    try:
        return Checkpoints(folder, identity)
    except OSError as error:
        raise ValueError(
            f"checkpoint: the folder {os.fspath(folder)!r} cannot be made "
            f"({error.strerror or error}): choose another one."
        ) from error
