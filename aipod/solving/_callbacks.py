"""Functions that `solve` calls between chunks of steps: they look, log, and may end the run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from aipod.solving._history import History
from aipod.solving._processes import first, said_by_first

# Ten calls a second: often enough to watch a run, rarely enough to cost it nothing.
SECONDS = 0.1
_GO_ON, _END, _FAILED = 0.0, 1.0, 2.0


class Row(Mapping[str, Any]):
    """The newest recorded row, by name; empty before the first one.

    - `history`: all rows so far, those before a resumption too.
    - `new`: the rows since the last call, of this process.
    """

    def __init__(self, history: History, new: History) -> None:
        self.history, self.new = history, new
        self._values = {k: v[-1] for k, v in history.items() if len(v)}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            known = ", ".join(self._values) or "nothing yet"
            raise KeyError(f"{name!r} is not recorded; there are: {known}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


# (step, x, y, row) -> True or a text with the reason to end the run; anything else goes on.
Callback = Callable[[int, PyTree, PyTree, Row], Any]


class CallbackError(RuntimeError):
    """Raised when a callback raises. The state of the run is in `.solution`.

    It is in the checkpoint too, where `solve` has one.

    !!! example
        ```python
        def fails(step, x, y, row):
            raise ConnectionError("the logging server is gone")


        try:
            aipod.solve(problem, solver, x0, y0, 100, key=key, callbacks=[fails])
        except aipod.CallbackError as error:
            solution = error.solution
        ```
    """

    def __init__(self, message: str, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


@dataclasses.dataclass
class Callbacks:
    """The callbacks of one run, in the order in which they are called.

    - `called`: the functions.
    - `words`: the reason that one of them gave to end the run.
    """

    called: Sequence[Callback] = ()
    words: str = ""
    _rows: int | None = None

    @property
    def seconds(self) -> float:
        """The longest time between two calls that a chunk should take."""
        return SECONDS if self.called else float("inf")

    def begin(self, history: History) -> None:
        """Remembers how many rows there are before this process makes its first step."""
        self._rows = _count(history)

    def end_the_run(
        self, step: int, points: Callable[[], tuple[PyTree, PyTree]], history: History
    ) -> bool:
        """Calls all of them; returns whether one asks to end the run.

        All are called, also behind one that asks for the end, so that every log is whole.
        """
        if not self.called:
            return False
        new = History({name: column[self._rows :] for name, column in history.items()})
        self._rows = _count(history)
        x, y = points()
        said, failure = _GO_ON, None
        if first():
            row = Row(history, new)
            try:
                for number, callback in enumerate(self.called, 1):
                    answer = _call(number, callback, step, x, y, row)
                    if isinstance(answer, str) and answer:
                        said, self.words = _END, self.words or f" It said: {answer}."
                    elif isinstance(answer, bool | np.bool_) and answer:
                        said = _END
            except CallbackError as error:
                said, failure = _FAILED, error
        said = said_by_first(said)
        if said == _FAILED:
            raise failure or CallbackError("a callback of the first process raised an error.")
        return said == _END

    def close(self, solution: Any = None) -> None:
        """Closes those that can be closed, in their order; all of them, whatever one raises."""
        closed, self.called = self.called, ()
        failures = []
        for number, callback in enumerate(closed if first() else (), 1):
            try:
                getattr(callback, "close", lambda: None)()
            except Exception as error:
                words = f"callback {number} ({_name(callback)}) raised {_said(error)} in close()"
                failures.append((f"{words}; the state is kept in .solution.", error))
        for words, cause in failures[:1]:
            raise CallbackError(words, solution) from cause


def _call(number: int, callback: Callback, *arguments: Any) -> Any:
    try:
        return callback(*arguments)
    except Exception as error:
        raise CallbackError(
            f"callback {number} ({_name(callback)}) raised {_said(error)} after outer step "
            f"{arguments[0]}"
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__} ({error})" if str(error) else type(error).__name__


def _name(callback: Callback) -> str:
    return getattr(callback, "__name__", None) or type(callback).__name__


def _count(history: History) -> int:
    return len(next(iter(history.values()), ()))
