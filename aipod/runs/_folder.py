"""A folder with everything about one run, or about one comparison of runs.

    config.toml     what was run; `aipod run --config config.toml` repeats it
    metrics.csv     one row for each recorded step (and metrics.parquet where pyarrow is installed)
    summary.json    how it ended, the totals, the environment
    model.npz       of a federation: x and y as the server last had them
    checkpoint/     the newest states, to resume from
    figures/        PNG for screens, SVG for print; picture.* is the experiment's own
    tensorboard/    event files, when they were asked for
    runs/           of a comparison: a folder like this for each variant and seed

Nothing is written into a folder that holds other files, and no run is replaced without `force`.
Every file is written whole or not at all. What is read may be damaged or made by somebody else:
anything that is not a run gets one sentence.
"""

import csv
import dataclasses
import importlib.util
import io
import json
import shutil
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aipod._misc.files import atomic, remove_leftovers, write_text
from aipod.runs._summary import check_summary

_CONFIG, _METRICS, _SUMMARY = "config.toml", "metrics.csv", "summary.json"
_PARQUET, _REPORT = "metrics.parquet", "report.html"
_TABLE, _MODEL = "table.md", "model.npz"
_FILES = (_CONFIG, _METRICS, _PARQUET, _SUMMARY, _REPORT, _TABLE, _MODEL)
_FOLDERS = ("checkpoint", "figures", "tensorboard", "runs")
_REPEAT = "repeat the run with --force"


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

    @property
    def model(self) -> Path:
        return self.path / _MODEL

    def is_run(self) -> bool:
        try:
            return self.config.is_file()
        except OSError:  # a folder that may not be looked into
            return False

    def create(self, config: str, *, force: bool = False) -> None:
        """Makes the folder with its `config.toml`; an older run is replaced only with `force`."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder: choose another one with --out.")
        for name in _FILES:
            remove_leftovers(self.path, name)
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
        for name in (*_FILES, *_FOLDERS):
            _remove(self.path / name)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, text: str) -> None:
        write_text(self.config, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text(self.path / _SUMMARY, json.dumps(finite(summary), indent=2) + "\n")

    def write_table(self, text: str) -> None:
        write_text(self.path / _TABLE, text)

    def write_metrics(self, columns: Mapping[str, np.ndarray]) -> None:
        """One row for each recorded step; an array for each step becomes columns name[0], ..."""
        flat = _flatten(columns)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(flat)
        writer.writerows(zip(*(map(str, column) for column in flat.values()), strict=True))
        write_text(self.path / _METRICS, text.getvalue())
        if importlib.util.find_spec("pyarrow") is not None:
            import pyarrow
            import pyarrow.parquet

            with atomic(self.path / _PARQUET) as file:
                pyarrow.parquet.write_table(pyarrow.table(flat), file)

    def read_config(self) -> dict[str, Any]:
        """The names and values of `config.toml`."""
        try:
            return tomllib.loads(self._read(_CONFIG, "it is not the folder of a run"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{self.config} is not valid TOML: {error}; {_REPEAT}.") from None

    def read_summary(self) -> dict[str, Any]:
        text = self._read(_SUMMARY, "the run did not end; finish it with --resume")
        try:
            summary = json.loads(text)
            check_summary(summary)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / _SUMMARY} is damaged ({error}): {_REPEAT}.") from None
        return summary

    def read_metrics(self) -> dict[str, np.ndarray]:
        file = io.StringIO(self._read(_METRICS, "repeat the run"), newline="")
        try:
            names = next(csv.reader(file), [])
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # NumPy only warns when there are no rows
                table = np.loadtxt(file, delimiter=",", ndmin=2)
            if table.shape[1] != len(names) or len(set(names)) != len(names):
                raise ValueError("its rows do not fit its header")
        except (ValueError, UserWarning, csv.Error) as error:
            reason = str(error).splitlines()[0].strip(".")
            raise ValueError(f"{self.path / _METRICS} is damaged ({reason}): {_REPEAT}.") from None
        return dict(zip(names, table.T, strict=True))

    def _read(self, name: str, when_missing: str) -> str:
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{self.path} has no {name}: {when_missing}.") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is damaged (it is not a text in UTF-8): {_REPEAT}.") from None
        except OSError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"{path} cannot be read ({reason}): put the file of a run there.")


def _remove(path: Path) -> None:
    """Removes a file, a link or a whole folder; what a link points to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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


def finite(value: Any) -> Any:
    """With null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
