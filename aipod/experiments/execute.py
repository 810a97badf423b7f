"""One run from its configuration to its folder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

import aipod
from aipod.experiments import load, solvers
from aipod.experiments.base import Experiment, Task
from aipod.experiments.config import RunConfig
from aipod.experiments.tensorboard import EventWriter
from aipod.runs._environment import environment
from aipod.runs._folder import RunFolder
from aipod.solving import Progress, Solution

# Accuracies whose first step and rounds are told, for experiments that record an accuracy.
_LEVELS = (0.80, 0.85, 0.90, 0.92, 0.94, 0.96)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: all that can be wrong with its configuration was found."""

    config: RunConfig
    experiment: Experiment
    task: Task
    solver: Any

    def with_seed(self, seed: int) -> "Prepared":
        """The same objects with another seed: `solve` then compiles nothing anew."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, seed=seed))


def prepare(config: RunConfig, task: Task | None = None) -> Prepared:
    """Builds the problem (unless there is one already) and the solver."""
    jax.config.update("jax_enable_x64", config.x64)
    experiment = load(config.experiment)
    solver = solvers.make(config.solver, config.arguments)
    if task is None:
        task = experiment.build(experiment.options(**config.options))
    solver.init(task.problem, task.x0, task.y0)  # says what does not fit together
    return Prepared(config, experiment, task, solver)


def execute(
    run: Prepared,
    folder: RunFolder,
    *,
    resume: bool = False,
    front: Callable[[Progress], None] | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Solves, writes metrics and summary into the folder, and returns the summary."""
    config, task = run.config, run.task
    events = EventWriter(folder.tensorboard) if tensorboard else None
    began = datetime.now(UTC).isoformat(timespec="seconds")

    def report(progress: Progress) -> None:
        if events is not None:
            events.write(progress.history)
        if front is not None:
            front(progress)

    try:
        solution = aipod.solve(
            task.problem,
            run.solver,
            task.x0,
            task.y0,
            config.steps,
            key=jax.random.key(config.seed),
            record=task.record,
            every=config.every,
            progress=report,
            checkpoint=folder.checkpoint,
            resume=resume,
            throw=False,
        )
    finally:
        if events is not None:
            events.close()
    return write_results(run, folder, solution, began)


def write_results(
    run: Prepared, folder: RunFolder, solution: Solution, began: str
) -> dict[str, Any]:
    """Writes the metrics and the summary of a run into its folder, and returns the summary."""
    columns = _columns(solution, run.task)
    if columns:
        folder.write_metrics(columns)
    summary = _summary(run, solution, columns) | {"began": began, "environment": environment()}
    picture = run.task.picture
    if picture is not None and columns and solution.result.ok:
        from aipod.report.figures import picture_figure

        picture_figure(picture, *solution.feasible(), folder.figures)
        summary["picture"] = picture.caption
    folder.write_summary(summary)
    return summary


def _columns(solution: Solution, task: Task) -> dict[str, np.ndarray]:
    columns = dict(solution.history)
    if not len(solution.seconds):  # interrupted before the first row
        return {}
    kinds = ("upper_projections", "lower_projections", "adjoint_projections")
    columns["projections"] = np.sum([columns[kind] for kind in kinds], axis=0)
    columns["seconds"] = _spread(columns["step"], solution.seconds)
    return columns | task.derive(columns)


def _spread(steps: np.ndarray, clock: np.ndarray) -> np.ndarray:
    """The time of each row. The clock is read once for a chunk of steps: share that out evenly."""
    ends = np.flatnonzero(np.append(clock[1:] != clock[:-1], True))
    return np.interp(steps, np.append(0, steps[ends]), np.append(0.0, clock[ends])).round(6)


def _summary(run: Prepared, solution: Solution, columns: Mapping[str, Any]) -> dict[str, Any]:
    config, experiment = run.config, run.experiment
    summary = {
        "kind": "run",
        "experiment": config.experiment,
        "solver": config.solver,
        "seed": config.seed,
        "result": solution.result.name,
        "message": solution.message,
        "steps": int(solution.state.step),
        "seconds": float(columns["seconds"][-1]) if columns else 0.0,
        "last": {name: column[-1].item() for name, column in columns.items() if column.ndim == 1},
        "ledger": solution.ledger.asdict(),
        "config": config.flat(),
        "arguments": config.arguments,
        "metrics": [dataclasses.asdict(metric) for metric in experiment.metrics],
        "axes": list(experiment.axes),
    }
    if "accuracy" in columns:
        summary["first"] = first(columns)
    return summary


def first(
    columns: Mapping[str, np.ndarray],
    levels: Sequence[float] = _LEVELS,
    names: Sequence[str] = ("step", "rounds"),
) -> dict[str, dict[str, int] | None]:
    """For each accuracy the first recorded step and rounds that reached it; None if none did."""
    found: dict[str, dict[str, int] | None] = {}
    for level in levels:
        rows = np.flatnonzero(columns["accuracy"] >= level)
        counted = {name: columns[name] for name in names if name in columns}
        found[f"{level:.2f}"] = (
            {name: int(column[rows[0]]) for name, column in counted.items()} if len(rows) else None
        )
    return found
