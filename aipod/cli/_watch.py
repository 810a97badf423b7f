"""A run's progress on standard error, and Ctrl-C that waits for a good moment."""

import contextlib
import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from aipod.cli._show import err
from aipod.solving import Progress as Report

# Seconds between two lines where nobody watches a terminal.
_LINE_SECONDS = 10.0


class Watch:
    """The front end of `solve` for one run, or for several one after another.

    The first Ctrl-C (or a polite kill) is remembered, and ends the run after the chunk of steps
    that is being computed, when all of it is on record. The second one ends it at once,
    and a third one ends the process.
    """

    def __init__(self, runs: int = 1) -> None:
        self.stopped = False
        self._signals = 0
        self._runs, self._done = runs, 0
        self._name = ""
        self._told = 0.0
        self._bar: Progress | None = None
        self._task: Any = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Watch":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, self._interrupt)
            except ValueError:  # not the main thread: leave signals to whoever has it
                break
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.fields[run]}"),
                BarColumn(bar_width=12),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
                console=err,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 2:
            # An exception can get lost in a callback; checkpoints are whole at every moment.
            os._exit(130)
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        with contextlib.suppress(RuntimeError):  # in the middle of another line
            err.print("stopping after this chunk of steps; once more stops at once")

    def begin(self, name: str, steps: int) -> None:
        """Announces the next run."""
        self._name = f"{self._done + 1}/{self._runs} {name}" if self._runs > 1 else name
        self._done += 1
        # One run alone shows a sign of life at once.
        self._told = time.monotonic() - (_LINE_SECONDS if self._runs == 1 else 0)
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task("compiling", total=steps, run=self._name)

    def end(self, words: str) -> None:
        """Says in a line how one of several runs ended."""
        err.print(f"{self._name}: {words}")

    def __call__(self, report: Report) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=_describe(report))
        elif time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            err.print(f"{self._name}: {report.step:,}/{report.steps:,} steps, {_describe(report)}")
        if self.stopped and not report.done:
            raise KeyboardInterrupt


def _describe(report: Report) -> str:
    """The speed, and the first metric that the experiment records."""
    first = [f"{k} {v:.3g}" for k, v in report.metrics.items() if isinstance(v, float)][:1]
    return ", ".join([f"{report.steps_per_second:,.0f} steps/s", *first])
