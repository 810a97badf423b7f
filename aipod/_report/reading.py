"""Reads run folders and checks everything that pages and figures rely on."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aipod.runs._folder import RunFolder

# The columns that can be drawn against, in the order of the report's menu.
AXES = {
    "step": "outer steps",
    "projections": "projections, all kinds",
    "lower_projections": "projections of y",
    "upper_projections": "projections of x",
    "adjoint_projections": "projections in the adjoint",
    "samples": "samples",
    "rounds": "communication rounds",
    "bytes_up": "bytes sent by one client",
    "bytes_down": "bytes received by one client",
    "messages": "messages along links",
    "bytes_per_link": "bytes over one link",
    "seconds": "computing time (s)",
}

# A shape is a type, [shape] for a list, {str: shape} for a dictionary with any keys, or a
# dictionary of required keys.
_RUN = {
    "experiment": str,
    "solver": str,
    "seed": int,
    "result": str,
    "seconds": int | float,
    "config": {str: object},
    "metrics": [{"name": str, "label": str, "log": bool, "better": str}],
    "axes": [str],
    "environment": {str: object},
}
_COMPARISON = {
    "folders": {str: str},
    "panels": [{"title": str, "variants": [str]}],
    "references": [{"panels": [str], "label": str, "columns": {str: [int | float]}}],
}


@dataclasses.dataclass(frozen=True)
class Run:
    path: Path
    summary: dict[str, Any]
    columns: dict[str, np.ndarray]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration without the seed."""
        return {name: value for name, value in self.summary["config"].items() if name != "seed"}


def results(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Returns the folders at or below these paths that hold results, with their summaries.

    A summary.json without a config.toml beside it belongs to another program and is ignored, and
    so is a run that ended before it recorded anything.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no folder {path}.")
        here = dict(_results(path))
        if not here:
            raise ValueError(f"there is no finished run in {path}: `aipod run` writes one.")
        # Two of the paths may lead to the same folder.
        known = {folder.resolve() for folder in found}
        found |= {folder: s for folder, s in here.items() if folder.resolve() not in known}
    return found


def _results(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(path.rglob("summary.json")):
        if file.is_file() and RunFolder(file.parent).is_run():
            summary = read_summary(file.parent)
            kind = summary.get("kind")
            if kind in ("rates", "table1") or (kind == "run" and summary.get("last")):
                yield file.parent, summary


def read_summary(path: Path) -> dict[str, Any]:
    try:
        found: Any = RunFolder(path).read_summary()
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise _damaged(path, "what it should hold")
    return found


def read_run(path: Path, summary: dict[str, Any]) -> Run:
    """Returns the run in a folder, or raises `ValueError` if anything is missing."""
    check_summary(path, summary, _RUN)
    # Opening a named pipe would wait forever.
    if not (path / "metrics.csv").is_file():
        raise ValueError(f"{path} has no metrics.csv: repeat the run.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of a file without rows, which raises below
        columns = RunFolder(path).read_metrics()
    wanted = {"step", *summary["axes"]}
    if not summary["axes"] or not wanted <= set(AXES):
        raise _damaged(path, "axes")
    shown = [metric["name"] for metric in summary["metrics"] if metric["name"] in columns]
    if not wanted <= set(columns) or not shown or not len(columns["step"]):
        raise ValueError(f"{path / 'metrics.csv'} is damaged: repeat the run with --force.")
    return Run(path, summary, columns)


def read_comparison(path: Path) -> dict[str, Any] | None:
    """Returns the summary of a finished comparison in this folder, or None."""
    if not (path / "summary.json").is_file():
        return None
    summary = read_summary(path)
    if summary.get("kind") != "comparison":
        return None
    check_summary(path, {"references": []} | summary, _COMPARISON)
    named = {variant for panel in summary["panels"] for variant in panel["variants"]}
    if not named <= set(summary["folders"]):
        raise _damaged(path, "folders")
    return summary


def _damaged(path: Path, what: str) -> ValueError:
    file = path / "summary.json"
    return ValueError(
        f"{file} is damaged ({what} is missing or odd): repeat the run with --force, or leave this "
        "folder out."
    )


def check_summary(path: Path, summary: dict[str, Any], shape: dict[str, Any]) -> None:
    """Raises `ValueError` for the first entry that does not have its shape."""
    for name, kind in shape.items():
        if not _fits(summary.get(name), kind):
            raise _damaged(path, name)


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        kinds = {name: shape[str] for name in value} if str in shape else shape
        return all(name in value and _fits(value[name], kind) for name, kind in kinds.items())
    return isinstance(value, shape)
