"""Callbacks for `aipod.solve`: logging to files and services, and early stopping.

A callback is a function (step, x, y, row) that is called between chunks of steps, up to ten times
a second; `row` is the newest recorded row, by name. If it returns True, or a text with its reason,
the run ends. A callback with a method `close` is closed at the end of the run, however it ends.

    aipod.solve(..., callbacks=[aipod.callbacks.CSV("run.csv"), lambda step, x, y, row: step > 500])
"""

import csv
import importlib.util
import math
import os
from pathlib import Path
from typing import Any, Literal, TextIO

from jaxtyping import PyTree

from aipod._misc.extras import EXTRA_OF, install
from aipod.solving import History, Row
from aipod.stepsize import check_steps

# The best value so far and its step, before the first row.
_NO_BEST: tuple[float, int | None] = (math.inf, None)


class CSV:
    """Writes each recorded row to a CSV file, in time to be watched with `tail -f`.

    A resumed run writes the rows of its checkpoint again, so that the file is always whole.
    Arrays are left out.

    !!! example
        ```python
        log = aipod.callbacks.CSV("metrics.csv")
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if self._path.is_dir():
            raise ValueError(f"CSV: {self._path} is a folder: name a file, such as metrics.csv.")
        self._file: TextIO | None = None

    def __call__(self, step: int, x: PyTree, y: PyTree, row: Row) -> None:
        new = row.new
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", newline="", encoding="utf-8")
            new = row.history
        writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0 and len(row):
            writer.writerow(_scalars(row.history))
        writer.writerows(values.values() for _, values in _rows(new))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Writes each recorded row as scalars for TensorBoard, with tensorboardX.

    `tensorboard --logdir FOLDER` shows them while the run goes on.

    !!! example
        ```python
        log = aipod.callbacks.TensorBoard("tensorboard/first")
        ```
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _require("tensorboardX", "TensorBoard")
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def __call__(self, step: int, x: PyTree, y: PyTree, row: Row) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(self._folder, write_to_disk=True)
        for at, values in _rows(row.new):
            for name, value in values.items():
                if name != "step":
                    self._writer.add_scalar(name, value, at)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Sends each recorded row to Weights & Biases.

    `options` go to `wandb.init`, such as `mode="offline"`, `name=` or `config=`.

    !!! example
        ```python
        def log(project):
            return aipod.callbacks.WandB(project, mode="offline", config={"lower_prob": 0.3})
        ```
    """

    def __init__(self, project: str, **options: Any) -> None:
        _require("wandb", "WandB")
        self._options = {"project": project, **options}
        self._run: Any = None

    def __call__(self, step: int, x: PyTree, y: PyTree, row: Row) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        for at, values in _rows(row.new):
            self._run.log({k: v for k, v in values.items() if k != "step"}, step=at)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow:
    """Logs each recorded row as metrics of an MLflow run.

    It uses the run that is active; without one it starts a run, with `options` for
    `mlflow.start_run`, and ends it.

    !!! example
        ```python
        def log():
            return aipod.callbacks.MLflow(run_name="first")
        ```
    """

    def __init__(self, **options: Any) -> None:
        _require("mlflow", "MLflow")
        self._options = options
        self._started: bool | None = None

    def __call__(self, step: int, x: PyTree, y: PyTree, row: Row) -> None:
        import mlflow

        if self._started is None:
            self._started = mlflow.active_run() is None
            if self._started:
                mlflow.start_run(**self._options)
        for at, values in _rows(row.new):
            mlflow.log_metrics({k: v for k, v in values.items() if k != "step"}, step=at)

    def close(self) -> None:
        if self._started:
            import mlflow

            mlflow.end_run()
        self._started = None


class Patience:
    """Early stopping: ends the run when a recorded metric no longer improves.

    `aipod.Stop(patience=)` needs no record: it asks whether F still decreases.

    - `metric`: its name in the record.
    - `steps`: outer steps without an improvement.
    - `better`: "smaller" or "larger".
    - `least`: a smaller improvement than this is none.

    !!! example
        ```python
        stop = aipod.callbacks.Patience("validation_loss", 500)
        ```
    """

    def __init__(
        self,
        metric: str,
        steps: int,
        *,
        better: Literal["smaller", "larger"] = "smaller",
        least: float = 0.0,
    ) -> None:
        check_steps(steps, "Patience: steps")
        if better not in ("smaller", "larger"):
            raise ValueError(f'Patience: better must be "smaller" or "larger", got {better!r}.')
        if not 0 <= least < math.inf:
            raise ValueError(f"Patience: least must be 0 or more, got {least!r}.")
        self._metric, self._steps, self._least = metric, steps, least
        self._sign = 1.0 if better == "smaller" else -1.0
        self._best, self._best_step = _NO_BEST

    def __call__(self, step: int, x: PyTree, y: PyTree, row: Row) -> str | None:
        if not len(row):
            return None
        if self._metric not in row:
            known = ", ".join(row)
            raise ValueError(f"Patience: {self._metric!r} is not recorded; there are: {known}.")
        # All rows at the first call: a resumed run remembers its best value.
        for at, values in _rows(row.history if self._best_step is None else row.new):
            value = self._sign * values[self._metric]
            if self._best_step is None or value < self._best - self._least:
                self._best, self._best_step = value, at
        newest = int(row["step"])
        if self._best_step is None or newest - self._best_step < self._steps:
            return None
        return (
            f"{self._metric} has not improved for {newest - self._best_step:,} outer steps; its "
            f"best is {self._sign * self._best:.6g}, at step {self._best_step:,}"
        )

    def close(self) -> None:
        """Forgets what it saw, for another run."""
        self._best, self._best_step = _NO_BEST


def _scalars(history: History) -> list[str]:
    return [name for name, column in history.items() if column.ndim == 1]


def _rows(history: History) -> list[tuple[int, dict[str, float | int]]]:
    """Each row of a history with its step; scalars alone."""
    names = _scalars(history)
    columns = zip(*(history[name].tolist() for name in names), strict=True)
    rows = [dict(zip(names, values, strict=True)) for values in columns]
    return [(int(row["step"]), row) for row in rows]


def _require(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{what} needs {module}; to add it: {install(EXTRA_OF[module])}")
