"""From a solution to the files of its run folder: the metrics, the picture and the summary."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aipod.runs._description import Description
from aipod.runs._environment import environment
from aipod.runs._folder import RunFolder
from aipod.solving import SavedSolution, Solution

# The summary tells when each of these accuracies was first reached.
_LEVELS = (0.80, 0.85, 0.90, 0.92, 0.94, 0.96)


def write_results(
    run: Description, folder: RunFolder, solution: Solution, began: str
) -> dict[str, Any]:
    """Writes the metrics, the picture and the summary of a run, and returns the summary.

    **Arguments:**

    - `run`: what was run.
    - `folder`: where to write.
    - `solution`: how it ended, or how far it is.
    - `began`: when it began, as text.
    """
    columns = _columns(run, solution)
    if columns:
        folder.write_metrics(columns)
    summary = _summary(run, solution, columns) | {"began": began, "environment": environment()}
    if run.picture is not None and columns and solution.result.ok:
        run.picture.draw(*solution.feasible(), folder.figures, columns)
        summary["picture"] = run.picture.caption
    folder.write_summary(summary)
    return summary


def as_columns(solution: Solution | SavedSolution) -> dict[str, np.ndarray]:
    """The history with the sum of projections and the time of each row; empty without rows."""
    columns = dict(solution.history)
    if not len(solution.seconds):  # interrupted before the first row
        return {}
    kinds = ("upper_projections", "lower_projections", "adjoint_projections")
    columns["projections"] = np.sum([columns[kind] for kind in kinds], axis=0)
    columns["seconds"] = _spread(columns["step"], solution.seconds)
    return columns


def _columns(run: Description, solution: Solution) -> dict[str, np.ndarray]:
    columns = as_columns(solution)
    return columns | dict(run.derive(columns)) if columns else {}


def _spread(steps: np.ndarray, clock: np.ndarray) -> np.ndarray:
    """The time of each row; the clock is read once per chunk, whose steps share the time evenly."""
    ends = np.flatnonzero(np.append(clock[1:] != clock[:-1], True))
    return np.interp(steps, np.append(0, steps[ends]), np.append(0.0, clock[ends])).round(6)


def as_summary(
    solution: Solution | SavedSolution,
    columns: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a summary says about a solution, whatever was run."""
    said = solution.convergence
    names = ("converged", "stationarity", "standard_error", "start", "reason", "advice")
    found = {
        "kind": "run",
        "result": solution.result.name,
        "message": solution.message,
        "seconds": float(columns["seconds"][-1]) if columns else 0.0,
        "last": {name: column[-1].item() for name, column in columns.items() if column.ndim == 1},
        "ledger": solution.ledger.asdict(),
        "metrics": [_decided(metric, columns) for metric in metrics],
    }
    if said is not None:
        found["convergence"] = {name: getattr(said, name) for name in names}
    return found


def _summary(run: Description, solution: Solution, columns: Mapping[str, Any]) -> dict[str, Any]:
    found = as_summary(solution, columns, run.metrics)
    summary = {
        "kind": found.pop("kind"),
        "experiment": run.experiment,
        "solver": run.solver,
        "seed": run.seed,
        "result": found.pop("result"),
        "message": found.pop("message"),
        "steps": int(solution.state.step),
        "config": dict(run.config),
        "arguments": dict(run.arguments),
        "axes": list(run.axes),
        **found,
    }
    if run.about:
        summary["about"] = run.about
    if "accuracy" in columns:
        summary["first"] = first(columns)
    return summary


def _decided(metric: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The metric with `log` decided: for positive values over more than one power of ten."""
    if metric["log"] is not None:
        return dict(metric)
    values = np.asarray(columns.get(metric["name"], ()))
    values = values[np.isfinite(values)]
    log = bool(len(values) and values.min() > 0 and values.max() > 10 * values.min())
    return {**metric, "log": log}


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
