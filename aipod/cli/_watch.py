"""Shows progress on stderr, and stops a run on Ctrl-C after the current chunk of steps."""

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

# Seconds between two lines when stderr is not a terminal.
_LINE_SECONDS = 10.0


class Watch:
    """The `progress` callback of `solve`, for one run or for several in sequence.

    The first Ctrl-C (or SIGTERM) stops the run after the current chunk of steps, when everything
    has been saved. The second one stops it at once, and the third one ends the process.
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
            except ValueError:  # only the main thread may set handlers
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
            # Python can drop an exception in a callback; checkpoints are always complete files.
            os._exit(130)
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        # The signal may arrive while another line is being written.
        with contextlib.suppress(RuntimeError):
            err.print("stopping after this chunk of steps; once more stops at once")

    def begin(self, name: str, steps: int) -> None:
        """Announces the next run."""
        self._name = f"{self._done + 1}/{self._runs} {name}" if self._runs > 1 else name
        self._done += 1
        # A single run prints its first line at once.
        self._told = time.monotonic() - (_LINE_SECONDS if self._runs == 1 else 0)
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task("compiling", total=steps, run=self._name)

    def end(self, words: str) -> None:
        """Prints how one of several runs ended."""
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
    """Returns the speed and the first metric."""
    floats = {k: v for k, v in report.metrics.items() if isinstance(v, float)}
    own = [name for name in floats if name != "curvature"] or list(floats)
    first = [f"{name} {floats[name]:.3g}" for name in own[:1]]
    return ", ".join([f"{report.steps_per_second:,.0f} steps/s", *first])
