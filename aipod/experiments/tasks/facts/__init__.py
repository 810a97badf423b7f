"""Small tables of facts that the applications use; README.md beside them says whose they are."""

import csv
from importlib import resources
from typing import NamedTuple

import numpy as np


class Table(NamedTuple):
    """A table with the names of its rows and of its columns."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray


def table(name: str) -> Table:
    """The table of that name: the first line names the columns, the first column the rows."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    (_, *columns), *lines = csv.reader(text.splitlines())
    rows = tuple(line[0] for line in lines)
    return Table(rows, tuple(columns), np.array([line[1:] for line in lines], float))
