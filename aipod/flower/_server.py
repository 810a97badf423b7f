"""One run on the server, from its settings to its folder."""

import dataclasses
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from aipod._misc.digest import digest_arrays
from aipod.algorithms import Alternating
from aipod.flower._book import WIRE, Book, Record
from aipod.flower._client import solver_digest
from aipod.flower._coordinator import Coordinator
from aipod.flower._describe import describe
from aipod.flower._local import initial_state
from aipod.flower._model import write_model
from aipod.flower._parts import shared_leaves
from aipod.flower._progress import DivergedError, NotEnoughClientsError, Post, Progress, Terms
from aipod.flower._reply import Expected
from aipod.flower._within import Within, empty_problem
from aipod.runs._description import Describable
from aipod.runs._folder import RunFolder
from aipod.runs._results import write_results
from aipod.sets import AbstractSet
from aipod.solving import RECORDED, Result, Solution


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts, and what the server measures on the way.

    **Arguments:**

    - `x0`, `y0`: the starting point, without a client axis.
    - `record`: (x, y) -> dictionary of numbers, called on the mean of the clients' models, with a
        client axis of length 1; as `Task.record` in `aipod.experiments`.
    - `prepared`: what describes the run for a run folder, such as a prepared experiment of
        `aipod run`; by default the numbers of `record` do.
    - `name`: of the run, in its folder and in the report.
    - `upper_set`, `lower_set`: the sets that x and y must lie in, as the clients have them.

    !!! example
        ```python
        start = aipod.flower.Start(x0=jnp.zeros(9), y0=jnp.zeros(4))
        ```
    """

    x0: PyTree
    y0: PyTree
    record: Record | None = None
    prepared: Describable | None = None
    name: str = "federation"
    upper_set: AbstractSet | None = None
    lower_set: AbstractSet | None = None

    @property
    def within(self) -> Within:
        return self.upper_set, self.lower_set


@dataclasses.dataclass(frozen=True)
class Places:
    """The run folder, the folder of checkpoints, and whether to resume from there."""

    run: Path | None = None
    checkpoints: Path | None = None
    resume: bool = False

    @staticmethod
    def of(run_dir: str, checkpoint_dir: str, resume_from: str) -> "Places":
        """The places that three settings name, each of which may be empty.

        `resume_from` is a run folder, or a folder of checkpoints.
        """
        if resume_from:
            found = Path(resume_from)
            if RunFolder(found).is_run():
                return Places(found, RunFolder(found).checkpoint, True)
            if not any(found.glob("step-*.npz")):
                raise ValueError(
                    f"resume-from: {found} holds neither a run nor checkpoints; leave it empty to "
                    "start anew."
                )
            return Places(Path(run_dir) if run_dir else None, found, True)
        run = Path(run_dir) if run_dir else None
        default = None if run is None else RunFolder(run).checkpoint
        return Places(run, Path(checkpoint_dir) if checkpoint_dir else default, False)


def lead(
    post: Post,
    solver: Alternating,
    start: Start,
    terms: Terms,
    places: Places,
    *,
    traffic: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    log: Callable[[str], None] = lambda line: None,
) -> Solution:
    """Leads a run to its end and writes its results; whatever ends the run, it is saved first."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    state = initial_state(solver, start.x0, start.y0, start.within)
    if solver.wire is not None and terms.min_nodes not in (None, terms.clients):
        raise ValueError(
            "compression needs all clients in every round: leave min-nodes at 0, or compression "
            "out of the solver's arguments."
        )
    shared = shared_leaves(solver, state)
    identity = {
        "solver": solver_digest(solver, start.within),
        "starting point": digest_arrays(shared.items()),
        "seed": str(terms.seed),
    }
    described = start.prepared
    if described is None and places.run is not None:
        described = describe(start.name, solver, terms, start.record, start.x0, start.y0)
    folder = _folder(described, places)
    empty = empty_problem(start.within)
    book = Book(empty, solver, state, start.record, places.checkpoints, identity, traffic)
    progress = book.load() if places.resume else None
    if progress is None:
        book.refuse_overwriting()
        progress = Progress(run=secrets.token_hex(6))
    else:
        log(f"goes on with run {progress.run} after {progress.exchange} exchanges")

    def write(solution: Solution) -> None:
        if folder is None or described is None:
            return
        # The server learns from its clients how many there are.
        run = described.describe(progress.clients or None)
        try:
            folder.write_config(run.toml)
            write_results(run, folder, solution, began)
            write_model(folder.model, solution.x, solution.y)
        except OSError as error:
            # The checkpoints have all of it; a full disk need not end the run.
            log(f"the run folder {folder.path} could not be written: {error}")

    def record(step: int, model: dict[str, np.ndarray]) -> None:
        book.add(step, model, progress)
        shown = {k: v for k, v in book.history.last().items() if k not in (*RECORDED, *WIRE)}
        metrics = "".join(f", {name} {value:.6g}" for name, value in shown.items())
        log(f"outer step {step} of {terms.steps}, {progress.rounds} rounds{metrics}")
        write(book.solution(Result.interrupted, "The run has not ended."))

    coordinator = Coordinator(
        post,
        terms,
        progress,
        expected=Expected(solver, state, terms),
        digest=identity["solver"],
        start=shared,
        save=lambda: book.save(progress),
        record=record,
        log=log,
    )

    def finish(result: Result, message: str) -> Solution:
        try:
            book.save(progress)
        except OSError as error:
            message += f" The last checkpoint could not be written: {error}."
        solution = book.solution(result, message)
        write(solution)
        log(message)
        return solution

    try:
        coordinator.run()
    except NotEnoughClientsError as error:
        return finish(Result.interrupted, str(error))
    except DivergedError as error:
        return finish(Result.diverged, f"{error} {solver.remedy()}")
    except OSError as error:
        return finish(Result.interrupted, f"{error}: go on with resume-from when that is mended.")
    except Exception as error:
        finish(Result.interrupted, f"The server failed with {type(error).__name__}: {error}.")
        raise
    return finish(Result.completed, f"{Result.completed.value} ({terms.steps:,} outer steps)")


def _folder(described: Describable | None, places: Places) -> RunFolder | None:
    if places.run is None or described is None:
        return None
    folder = RunFolder(places.run)
    if not places.resume:
        folder.create(described.describe().toml)
    return folder
