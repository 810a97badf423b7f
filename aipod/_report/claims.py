"""The results of a comparison as a table and as sentences."""

import dataclasses
from typing import Any

import numpy as np

from aipod._report.collect import Group, Section, View
from aipod._report.curves import curve, rows
from aipod._report.reading import AXES
from aipod.experiments.numbers import number, percent, ratio

# From this ratio on a report says that a variant is worse.
_CLEARLY = 1.2
# A value that has fallen to less than this share in a tenth of the run is still falling.
_STILL = 0.95


@dataclasses.dataclass(frozen=True)
class Row:
    """One group compared with the first group of its view, at the last step that both reached.

    `value` and `cost` are medians over seeds; `ratio` and `cost_ratio` are relative to the first
    group; `worst` is the largest ratio of the values at any recorded step.
    """

    label: str
    seeds: int
    results: dict[str, int]
    step: int
    value: float
    ratio: float
    worst: float
    cost: float
    cost_ratio: float
    seconds: float


def table(section: Section, view: View) -> list[Row]:
    return [_row(section, group, view.groups[0]) for group in view.groups]


def _row(section: Section, group: Group, measure: Group) -> Row:
    metric, cost = section.metrics[0]["name"], section.axes[0]
    length = min(rows(group), rows(measure))
    value, against = (curve(g, metric).middle[:length] for g in (group, measure))
    spent, before = (curve(g, cost).middle[:length] for g in (group, measure))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = value / against
        cost_ratio = float(np.divide(spent[-1], before[-1]))
    results = [run.summary["result"] for run in group.runs]
    return Row(
        label=group.label,
        seeds=len(group.runs),
        results={name: results.count(name) for name in dict.fromkeys(results)},
        step=int(curve(group, "step").middle[length - 1]),
        value=float(value[-1]),
        ratio=float(ratios[-1]),
        worst=float(np.max(ratios)),
        cost=float(spent[-1]),
        cost_ratio=cost_ratio,
        seconds=float(np.median([run.summary["seconds"] for run in group.runs])),
    )


def sentences(section: Section) -> list[str]:
    """One sentence for each view, comparing its cheapest group with its first."""
    said: list[str] = []
    for view in section.views:
        first, *others = table(section, view)
        if others:
            said.append(_sentence(section, first, min(others, key=lambda row: row.cost)))
            said += [
                _worse(section, first, row, group)
                for row, group in zip(others, view.groups[1:], strict=True)
                if section.metrics[0]["better"] == "smaller" and _CLEARLY <= row.ratio < np.inf
            ]
    return said


def _worse(section: Section, first: Row, row: Row, group: Group) -> str:
    value = curve(group, section.metrics[0]["name"]).middle
    ends = "levels off" if value[-1] >= _STILL * value[-1 - len(value) // 10] else "ends"
    return (
        f"{row.label} {ends} at {ratio(row.ratio)} times the {section.metrics[0]['label']} of "
        f"{first.label} ({number(row.value)} against {number(first.value)})."
    )


def _sentence(section: Section, first: Row, row: Row) -> str:
    metric, cost = section.metrics[0], AXES[section.axes[0]]
    values = f"{number(row.value)} against {number(first.value)}"
    if metric["better"] == "smaller":
        quality = (
            f"{ratio(row.ratio)} times the {metric['label']} of {first.label} ({values}, and never "
            f"more than {ratio(row.worst)} times)"
        )
    else:
        quality = f"the {metric['label']} {values} of {first.label}"
    dear = row.cost_ratio >= 2
    share = f"{number(row.cost_ratio)} times" if dear else f"{percent(row.cost_ratio)} of"
    return (
        f"After {number(row.step)} outer steps, {row.label} has {quality}, for {share} its {cost} "
        f"({number(row.cost, 0)} against {number(first.cost, 0)})."
    )


def as_data(section: Section) -> list[dict[str, Any]]:
    """The tables of all views, for `summary.json`."""
    return [
        {"title": view.title, "rows": [dataclasses.asdict(row) for row in table(section, view)]}
        for view in section.views
    ]
