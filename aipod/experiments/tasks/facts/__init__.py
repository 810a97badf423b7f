"""Small data tables for the applications; README.md names their sources."""

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
    """Reads a table; its first line names the columns, its first column the rows."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    (_, *columns), *lines = csv.reader(text.splitlines())
    rows = tuple(line[0] for line in lines)
    return Table(rows, tuple(columns), np.array([line[1:] for line in lines], float))
