"""The data of the gallery: small real tables that come with scikit-learn."""

from typing import NamedTuple

import numpy as np

from aipod._misc.extras import explain
from aipod.data import DataError


class Table(NamedTuple):
    """Examples in a random order that is always the same: inputs, and a target or a class."""

    inputs: np.ndarray
    targets: np.ndarray

    def split(self, *sizes: int) -> "list[Table]":
        """The first so many examples, the next so many, and so on."""
        ends = np.cumsum(sizes)
        starts = ends - sizes
        return [
            Table(self.inputs[a:b], self.targets[a:b]) for a, b in zip(starts, ends, strict=True)
        ]

    def with_constant(self) -> "Table":
        """The inputs with a column of ones at the end."""
        return Table(np.column_stack([self.inputs, np.ones(len(self.inputs))]), self.targets)


def diabetes() -> Table:
    """442 patients with ten measurements, standardised, and how far their illness went."""
    return _shuffled(*_load("diabetes", scaled=False))


def tumours() -> Table:
    """569 breast tumours with 30 measurements, standardised; the class 1 is benign."""
    return _shuffled(*_load("breast_cancer"))


def wines() -> Table:
    """178 wines of three growers, the classes, with 13 measurements, standardised."""
    return _shuffled(*_load("wine"))


def _load(name: str, **options: bool) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(explain(error) or str(error)) from error
    return getattr(datasets, f"load_{name}")(return_X_y=True, **options)


def _shuffled(inputs: np.ndarray, targets: np.ndarray) -> Table:
    order = np.random.default_rng(0).permutation(len(targets))
    inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    return Table(inputs[order], targets[order])
