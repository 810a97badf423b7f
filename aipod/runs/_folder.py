"""A folder with everything about one run, or about one comparison of runs.

    config.toml     what was run; `aipod run --config config.toml` repeats it
    metrics.csv     one row for each recorded step (and metrics.parquet where pyarrow is installed)
    summary.json    how it ended, the totals, the environment
    checkpoint/     the newest states, to resume from
    figures/        PNG for screens, SVG for print; picture.* is the experiment's own
    tensorboard/    event files, when they were asked for
    runs/           of a comparison: a folder like this for each variant and seed

A folder of somebody else's is never written into, and no run is replaced unless that was asked for.
"""

import csv
import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_CONFIG, _METRICS, _SUMMARY = "config.toml", "metrics.csv", "summary.json"
_PARQUET, _REPORT = "metrics.parquet", "report.html"
_TABLE = "table.md"
_FILES = (_CONFIG, _METRICS, _PARQUET, _SUMMARY, _REPORT, _TABLE)
_FOLDERS = ("checkpoint", "figures", "tensorboard", "runs")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def config(self) -> Path:
        return self.path / _CONFIG

    @property
    def report(self) -> Path:
        return self.path / _REPORT

    def is_run(self) -> bool:
        return self.config.is_file()

    def create(self, config: str, *, force: bool = False) -> None:
        """Makes the folder with its `config.toml`; replaces an older run only by `force`."""
        if self.path.is_dir() and any(self.path.iterdir()):
            if not self.is_run():
                raise ValueError(
                    f"{self.path} holds files that are not a run's: choose another folder with "
                    "--out."
                )
            if not force:
                raise ValueError(
                    f"{self.path} already holds a run: add --resume to go on with it, --force to "
                    "replace it, or choose another folder with --out."
                )
            self.clear()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)

    def clear(self) -> None:
        """Removes what a run writes, and the folder itself when nothing else is in it."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, text: str) -> None:
        _write(self.config, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write(self.path / _SUMMARY, json.dumps(finite(summary), indent=2) + "\n")

    def write_metrics(self, columns: Mapping[str, np.ndarray]) -> None:
        """One row for each recorded step; an array for each step becomes columns name[0], ..."""
        flat = _flatten(columns)
        path = self.path / _METRICS
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(flat)
            writer.writerows(zip(*(map(str, column) for column in flat.values()), strict=True))
        os.replace(temporary, path)
        if importlib.util.find_spec("pyarrow") is not None:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table(flat), self.path / _PARQUET)

    def read_summary(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / _SUMMARY).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} has no {_SUMMARY}: the run did not end; finish it with --resume."
            ) from None
        except ValueError:
            raise ValueError(
                f"{self.path / _SUMMARY} is damaged: repeat the run with --force."
            ) from None

    def read_metrics(self) -> dict[str, np.ndarray]:
        path = self.path / _METRICS
        try:
            with open(path, newline="", encoding="utf-8") as file:
                names = next(csv.reader(file))
                table = np.loadtxt(file, delimiter=",", ndmin=2)
            return dict(zip(names, table.reshape(-1, len(names)).T, strict=True))
        except FileNotFoundError:
            raise ValueError(f"{self.path} has no {_METRICS}: repeat the run.") from None
        except (ValueError, StopIteration):
            raise ValueError(f"{path} is damaged: repeat the run with --force.") from None


def _flatten(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        column = np.asarray(column)
        if column.ndim == 1:
            flat[name] = column
            continue
        for index in np.ndindex(column.shape[1:]):
            flat[f"{name}[{','.join(map(str, index))}]"] = column[(slice(None), *index)]
    return flat


def _write(path: Path, text: str) -> None:
    """All of the file or nothing, whenever the process ends."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def finite(value: Any) -> Any:
    """With null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
