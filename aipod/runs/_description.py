"""What a run folder says about a run besides its results."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import PyTree

Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """An experiment's own picture of its result.

    - `draw`: (x, y, folder, columns) writes `picture.png` and `picture.svg` into the folder.
    - `caption`: what the picture shows, in a sentence or two.
    """

    draw: Callable[[PyTree, PyTree, Path, Columns], object]
    caption: str


@dataclasses.dataclass(frozen=True)
class Description:
    """A run in plain values, as `config.toml` and `summary.json` have it.

    - `toml`: the text of `config.toml`.
    - `config`: everything that was chosen, by its name in `config.toml`.
    - `arguments`: the solver's share of `config`.
    - `metrics`: for each metric its `name`, `label`, `log` (None to decide by its values) and
        `better`; the headline first.
    - `axes`: the columns to draw against; the first is the cost that comparisons count.
    - `derive`: columns -> further columns.
    - `picture`: what the result looks like, for experiments that have a picture.
    - `about`: one line about the task, for the report.
    """

    experiment: str
    solver: str
    seed: int
    toml: str
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    axes: Sequence[str]
    derive: Callable[[Columns], Mapping[str, np.ndarray]] = lambda columns: {}
    picture: Drawing | None = None
    about: str = ""

    def describe(self, clients: int | None = None) -> "Description":
        return self


class Describable(Protocol):
    """Whatever can describe a run; a `Description` describes itself."""

    def describe(self, clients: int | None = None) -> Description:
        """The run, with as many clients as a federation turned out to have."""
