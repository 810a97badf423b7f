"""What a run gives back: `Solution`, with its `Result`, `History` and `Ledger`."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod._misc.extras import install
from aipod.algorithms._alternating import State
from aipod.problem._bilevel import Bilevel
from aipod.slots._cost import Counts


class Result(enum.Enum):
    """How a run ended; the value says what to do about it.

    !!! example
        ```python
        solution = aipod.solve(problem, solver, x0, y0, 100, key=key, throw=False)
        if not solution.result.ok:
            print(solution.result.value)
        ```
    """

    completed = "All outer steps were made."
    converged = "A recorded metric reached its tolerance."
    out_of_time = "The time given by Stop(seconds=) is over: resume, or allow more."
    out_of_projections = "The projections given by Stop(projections=) are spent: allow more."
    interrupted = "The run was interrupted; everything up to there is kept: resume it."
    diverged = "An iterate became NaN or infinite: use smaller steps, or aipod.Curvature()."

    @property
    def ok(self) -> bool:
        """Whether the solution can be used: anything but divergence."""
        return self is not Result.diverged


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The totals of a run: projections and samples of each kind, and in a federation what was sent.

    A round is an average that crosses clients; bytes are those that one client sends and gets.

    !!! example
        ```python
        solution.ledger.lower_projections, solution.ledger.samples
        ```
    """

    upper_projections: int = 0
    lower_projections: int = 0
    adjoint_projections: int = 0
    upper_samples: int = 0
    lower_samples: int = 0
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def projections(self) -> int:
        """Projections of all three kinds."""
        return self.upper_projections + self.lower_projections + self.adjoint_projections

    @property
    def samples(self) -> int:
        """Samples of both levels."""
        return self.upper_samples + self.lower_samples

    def asdict(self) -> dict[str, int]:
        return dataclasses.asdict(self) | {
            "projections": self.projections,
            "samples": self.samples,
        }


# The columns that every history has; the last three in a federation only.
RECORDED = (
    "step",
    "upper_projections",
    "lower_projections",
    "adjoint_projections",
    "samples",
    "upper_samples",
    "lower_samples",
    "rounds",
    "bytes_up",
    "bytes_down",
)


@dataclasses.dataclass(frozen=True)
class Price:
    """What one client's x and y weigh on the wire: turns a chunk's counts into a ledger's."""

    federated: bool
    x_up: int
    y_up: int
    x_down: int
    y_down: int

    @staticmethod
    def of(problem: Bilevel, state: State, wire: str | None) -> "Price":
        """`wire`: the type of the numbers that a client sends; None for their own."""
        sets, trees = (problem.upper_set, problem.lower_set), (state.x, state.y)
        down = [s.message_size(tree) for s, tree in zip(sets, trees, strict=True)]
        if wire is not None:
            trees = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(wire)), trees)
        up = [s.message_size(tree) for s, tree in zip(sets, trees, strict=True)]
        return Price(any(s.federated for s in sets), *up, *down)

    def _priced(self, counts: Mapping[str, Any], before: Ledger) -> dict[str, Any]:
        """Totals for each field of a ledger, from counts (numbers or columns) since `before`."""
        x, y = counts["sent_x"], counts["sent_y"]
        up, down = x * self.x_up + y * self.y_up, x * self.x_down + y * self.y_down
        spent = {**counts, "bytes_up": up, "bytes_down": down}
        return {
            field.name: spent[field.name] + getattr(before, field.name)
            for field in dataclasses.fields(Ledger)
        }

    def total(self, counts: Counts, before: Ledger) -> Ledger:
        """The ledger after a chunk."""
        numbers = {f.name: int(getattr(counts, f.name)) for f in dataclasses.fields(Counts)}
        return Ledger(**self._priced(numbers, before))

    def rows(self, rows: Mapping[str, np.ndarray], before: Ledger) -> dict[str, np.ndarray]:
        """The recorded rows of a chunk as columns of the history, counts first."""
        names = [field.name for field in dataclasses.fields(Counts)]
        totals = self._priced({name: rows[name].astype(np.int64) for name in names}, before)
        totals["samples"] = totals["upper_samples"] + totals["lower_samples"]
        totals["step"] = rows["step"].astype(np.int64)
        kept = RECORDED if self.federated else RECORDED[:-3]
        metrics = {k: v for k, v in rows.items() if k not in names and k != "step"}
        return {name: totals[name] for name in kept} | metrics


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


@dataclasses.dataclass(frozen=True)
class Solution:
    """The end of a run.

    x and y are the last iterates as the algorithm left them. Where projections are skipped they
    may lie a little outside their sets; `feasible()` gives the points of the sets nearest to them.

    - `x`, `y`: the last (finite) iterates.
    - `result`: how the run ended, a `Result`; `message` says it in words.
    - `history`, `ledger`: what was recorded, and the totals.
    - `state`: the solver's whole state, to go on from.
    - `seconds`: the time of the run when each row of the history was written, without compiling.

    !!! example
        ```python
        solution = aipod.solve(problem, solver, x0, y0, 100, key=jax.random.key(0))
        x, y = solution.feasible()
        solution.result, solution.ledger.projections
        ```
    """

    x: PyTree
    y: PyTree
    result: Result
    message: str
    history: History
    ledger: Ledger
    state: State
    seconds: np.ndarray
    problem: Bilevel = dataclasses.field(repr=False)

    def feasible(self) -> tuple[PyTree, PyTree]:
        """(x, y) projected on the upper set, and on the lower set at that x."""
        x = self.problem.upper_set.project(self.x)
        return x, self.problem.lower_set.project(self.y, x)

    def __repr__(self) -> str:
        last = ", ".join(f"{k}={v:.6g}" for k, v in self.history.last().items())
        return f"Solution({self.result.name}: {self.message} {last})"


class DivergedError(RuntimeError):
    """Raised by `solve(..., throw=True)`; the last finite state is in `.solution`.

    !!! example
        ```python
        try:
            solution = aipod.solve(problem, solver, x0, y0, 100, key=key)
        except aipod.DivergedError as error:
            solution = error.solution
        ```
    """

    def __init__(self, solution: Solution) -> None:
        super().__init__(solution.message)
        self.solution = solution


def scalar_columns(metrics: Any) -> dict[str, Any]:
    """What `record(x, y)` returned, as named columns; a bare scalar becomes `metric`."""
    named = metrics if isinstance(metrics, Mapping) else {"metric": metrics}
    for name, value in named.items():
        if not isinstance(name, str) or len(jax.tree.leaves(value)) != 1:
            raise ValueError(
                "record(x, y) must return a dictionary of names to arrays, such as "
                f"{{'loss': ...}}, but {name!r} holds {type(value).__name__}."
            )
    return dict(named)
