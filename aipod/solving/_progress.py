"""What a person sees while a run goes on."""

import dataclasses
import sys
from collections.abc import Callable
from html import escape
from typing import Any

from aipod.solving._history import History
from aipod.solving._ledger import FIELDS, Ledger


@dataclasses.dataclass(frozen=True)
class Progress:
    """One report of a running `solve`, for front ends of any kind."""

    step: int
    steps: int
    seconds: float
    steps_per_second: float
    ledger: Ledger
    history: History

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest entry of every column of the history."""
        return self.history.last()

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def describe(self) -> str:
        parts = [
            f"{self.steps_per_second:,.0f} steps/s",
            f"{self.ledger.projections:,} projections",
        ]
        counts = {"step", "samples", *FIELDS}
        parts += [f"{k} {v:.4g}" for k, v in self.metrics.items() if k not in counts]
        return ", ".join(parts)


Front = Callable[[Progress], None]


class _Bar:
    """A Rich progress bar; made at the first report and closed at the last."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            progress.BarColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            # Where front_for looked for a terminal; standard output may be a pipe.
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __call__(self, report: Progress) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=report.steps)
        self._bar.update(self._task, completed=report.step, description=report.describe())

    def close(self) -> None:
        self._bar.stop()


class _Line:
    """One rewritten line, where Rich is not installed."""

    def __call__(self, report: Progress) -> None:
        sys.stderr.write(f"\r{report.step:,}/{report.steps:,} {report.describe()}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\n")


class _Notebook:
    """A bar in the output of a notebook's cell, which is replaced at every report."""

    def __init__(self) -> None:
        display: Any = sys.modules["IPython.display"]
        self._html = display.HTML
        self._shown = display.display(display.HTML(""), display_id=True)

    def __call__(self, report: Progress) -> None:
        words = escape(f"{report.step:,}/{report.steps:,} {report.describe()}")
        bar = f'<progress value="{report.step}" max="{report.steps}"></progress>'
        self._shown.update(self._html(f"{bar} <code>{words}</code>"))

    def close(self) -> None:
        pass


class _Silent:
    def __call__(self, report: Progress) -> None:
        pass

    def close(self) -> None:
        pass


class _Callable:
    def __init__(self, function: Front) -> None:
        self._function = function

    def __call__(self, report: Progress) -> None:
        self._function(report)

    def close(self) -> None:
        pass


def _in_a_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is never imported to find out."""
    shell = sys.modules.get("IPython")
    if shell is None or "IPython.display" not in sys.modules:
        return False
    return getattr(shell.get_ipython(), "kernel", None) is not None


def front_for(progress: bool | Front) -> Any:
    """The front end that `solve(progress=)` asks for; silent when nobody watches a terminal."""
    if callable(progress):
        return _Callable(progress)
    if progress and _in_a_notebook():
        return _Notebook()
    if not progress or not sys.stderr.isatty():
        return _Silent()
    try:
        return _Bar()
    except ImportError:
        return _Line()
