"""What was recorded along a run."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aipod._misc.extras import install
from aipod._misc.tree import is_numeric


class History(Mapping[str, np.ndarray]):
    """Named columns with one entry for each recorded step.

    `step`, the ledger's counts so far, and whatever `record(x, y)` returned.

    !!! example
        ```python
        solution.history["step"], solution.history["lower_projections"]
        frame = solution.history.to_frame()
        ```
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._columns[name]
        except KeyError:
            known = ", ".join(self._columns) or "none"
            raise KeyError(f"no column {name!r} was recorded; there are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        rows = len(next(iter(self._columns.values()), ()))
        return f"History({rows} rows: {', '.join(self._columns)})"

    def extended(self, rows: Mapping[str, np.ndarray]) -> "History":
        """With more rows at the end; a first column set defines the names."""
        if not self._columns:
            return History(rows)
        return History({k: np.concatenate([self._columns[k], rows[k]]) for k in self._columns})

    def last(self) -> dict[str, Any]:
        """The newest entry of every column."""
        return {k: v[-1].item() for k, v in self._columns.items() if len(v) and v[-1].ndim == 0}

    def to_frame(self) -> Any:
        """A pandas DataFrame of the scalar columns; pandas must be installed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "History.to_frame needs pandas: read the columns as they are, history['step'], or "
                f"add pandas: {install('tables')}"
            ) from error
        return pd.DataFrame({k: v for k, v in self._columns.items() if v.ndim == 1})


def scalar_columns(metrics: Any) -> dict[str, Any]:
    """What `record(x, y)` returned, as named columns; a bare scalar becomes `metric`."""
    named = metrics if isinstance(metrics, Mapping) else {"metric": metrics}
    for name, value in named.items():
        if not isinstance(name, str) or not is_numeric(value):
            raise ValueError(
                "record(x, y) must return a dictionary of names to numbers or arrays, such as "
                f"{{'loss': ...}}, but {name!r} holds {type(value).__name__}."
            )
    return dict(named)
