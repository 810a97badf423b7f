"""Sorts runs into sections (one per experiment) and groups (runs that differ only in the seed)."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aipod._report.reading import Run, read_comparison, read_run, results
from aipod.experiments.numbers import setting
from aipod.experiments.solvers import ARGUMENTS, SOLVERS


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one configuration, one for each seed; `index` selects the colour and line style."""

    label: str
    index: int
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config


@dataclasses.dataclass(frozen=True)
class Reference:
    """A curve from another source, drawn as a dotted line."""

    label: str
    columns: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class View:
    """Groups that are drawn together; the others are compared with the first."""

    title: str
    groups: tuple[Group, ...]
    references: tuple[Reference, ...] = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """All runs of one experiment."""

    experiment: str
    metrics: tuple[dict[str, Any], ...]
    axes: tuple[str, ...]
    groups: tuple[Group, ...]
    views: tuple[View, ...]


def collect(paths: Sequence[Path]) -> tuple[Section, ...]:
    """Returns the sections of all runs at or below these folders."""
    found = results(paths).items()
    runs = [read_run(folder, summary) for folder, summary in found if summary["kind"] == "run"]
    experiments = dict.fromkeys(run.summary["experiment"] for run in runs)
    return tuple(
        _section([run for run in runs if run.summary["experiment"] == name], paths)
        for name in experiments
    )


def section_of(runs: list[Run]) -> Section:
    """The section of runs that lie in no folder."""
    return _section(runs, ())


def _section(runs: list[Run], paths: Sequence[Path]) -> Section:
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        by_config.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    order = _order(by_config, paths)
    members = [by_config[key] for key in order]
    labels = _labels([run[0] for run in members], _named(paths))
    groups = tuple(
        Group(label, index, tuple(sorted(runs, key=lambda run: run.summary["seed"])))
        for index, (label, runs) in enumerate(zip(labels, members, strict=True))
    )
    first = runs[0].summary
    shared = set.intersection(*(set(run.columns) for run in runs))
    metrics = tuple(metric for metric in first["metrics"] if metric["name"] in shared)
    if not metrics or not set(first["axes"]) <= shared:
        raise ValueError(
            f"the runs of {first['experiment']} recorded different things, "
            f"{runs[0].path} among them: report on them one by one."
        )
    return Section(
        experiment=first["experiment"],
        metrics=metrics,
        axes=tuple(first["axes"]),
        groups=groups,
        views=_views(groups, paths),
    )


def _comparison(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Returns the summary if the report is about one finished comparison, else None."""
    return read_comparison(paths[0]) if len(paths) == 1 else None


def _named(paths: Sequence[Path]) -> dict[str, set[str]]:
    """The arguments that the variants of a comparison set, by solver; labels show them."""
    named: dict[str, set[str]] = {}
    for variant in (_comparison(paths) or {"folders": ()})["folders"]:
        solver, *own = variant.split(":")
        names = {text.partition("=")[0].strip().replace("-", "_") for text in own}
        named.setdefault(solver, set()).update(names)
    return named


def _order(by_config: dict[str, list[Run]], paths: Sequence[Path]) -> list[str]:
    """The order of the comparison's variants, or else of the folders."""
    summary = _comparison(paths)
    if summary is None:
        return list(by_config)
    folders = list(dict.fromkeys(summary["folders"].values()))

    def place(key: str) -> int:
        name = by_config[key][0].path.parent.name
        # Runs that do not belong to the comparison come last.
        return folders.index(name) if name in folders else len(folders)

    return sorted(by_config, key=place)


def _views(groups: tuple[Group, ...], paths: Sequence[Path]) -> tuple[View, ...]:
    summary = _comparison(paths)
    if summary is None:
        return (View("", groups),)
    by_folder = {group.runs[0].path.parent.name: group for group in groups}
    views = []
    for panel in summary["panels"]:
        folders = [summary["folders"][variant] for variant in panel["variants"]]
        members = tuple(by_folder[name] for name in dict.fromkeys(folders) if name in by_folder)
        if members:
            references = tuple(
                Reference(one["label"], {k: np.array(v) for k, v in one["columns"].items()})
                for one in summary.get("references", ())
                if panel["title"] in one["panels"]
            )
            views.append(View(panel["title"], members, references))
    return tuple(views) or (View("", groups),)


def _labels(runs: list[Run], named: Mapping[str, set[str]]) -> list[str]:
    """Labels for the groups: the solver, and every setting in which they differ."""
    everywhere = {
        name
        for name in {name for run in runs for name in run.config}
        if name not in ARGUMENTS and name != "solver" and _differs(runs, name)
    }
    labels = []
    for run in runs:
        solver = run.summary["solver"]
        alike = [other for other in runs if other.summary["solver"] == solver]
        shown = [
            f"{_symbol(name)} = {setting(value)}"
            for name, value in run.config.items()
            if name in everywhere
            or name in named.get(solver, ())
            or (name in ARGUMENTS and _differs(alike, name))
        ]
        label = SOLVERS[solver].label if solver in SOLVERS else solver
        labels.append(f"{label} ({', '.join(shown)})" if shown else label)
    return labels


def _differs(runs: list[Run], name: str) -> bool:
    return len({json.dumps(run.config.get(name)) for run in runs}) > 1


def _symbol(name: str) -> str:
    known = ARGUMENTS.get(name)
    return (known.symbol if known else "") or name.replace("_", " ")
