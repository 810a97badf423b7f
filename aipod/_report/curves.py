"""Median and range of a column over the seeds of a group."""

import dataclasses

import numpy as np

from aipod._report.collect import Group
from aipod._report.reading import AXES


@dataclasses.dataclass(frozen=True)
class Curve:
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(group: Group, column: str) -> Curve:
    """Returns a column's median and range, over the rows that every seed has."""
    length = rows(group)
    stacked = np.stack([run.columns[column][:length] for run in group.runs])
    return Curve(np.median(stacked, axis=0), stacked.min(axis=0), stacked.max(axis=0))


def rows(group: Group) -> int:
    return min(len(run.columns["step"]) for run in group.runs)


def available_axes(groups: tuple[Group, ...]) -> list[str]:
    """Returns the axes that are not zero throughout, such as rounds without clients."""

    def moves(name: str) -> bool:
        columns = [run.columns.get(name) for group in groups for run in group.runs]
        return all(c is not None for c in columns) and any(
            c is not None and np.any(c > 0) for c in columns
        )

    return [name for name in AXES if moves(name)]


def thinned(length: int, most: int = 400) -> np.ndarray:
    """Selects rows to draw: half evenly spaced, half evenly on a log scale, both ends included."""
    if length <= most:
        return np.arange(length)
    even = np.linspace(0, length - 1, most // 2)
    logarithmic = np.geomspace(1, length, most // 2) - 1
    return np.unique(np.concatenate([even, logarithmic]).round().astype(int))
