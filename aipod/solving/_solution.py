"""What a run gives back."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from jaxtyping import PyTree

from aipod._misc.functions import release
from aipod.algorithms import Keeping, State
from aipod.problem import Bilevel
from aipod.sets import AbstractSet
from aipod.solving._convergence import Convergence
from aipod.solving._history import History
from aipod.solving._ledger import Ledger
from aipod.solving._plot import Shown
from aipod.solving._result import Result
from aipod.solving._saved import save
from aipod.solving._table import table

# The types of x and y: type checkers know those of `solution.x` from x0. A bare `Solution` is one
# of anything, which only their own TypeVar can say before Python 3.13.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    X = TypeVar("X", default=Any)
    Y = TypeVar("Y", default=Any)
else:
    from typing import TypeVar

    X = TypeVar("X")
    Y = TypeVar("Y")


@dataclasses.dataclass(frozen=True)
class Solution(Shown, Generic[X, Y]):
    """The end of a run; prints as a short table, and in a notebook as its table and figure.

    x and y are the last iterates as the algorithm left them. Where projections are skipped they
    may lie a little outside their sets; `feasible()` gives the points of the sets nearest to them.

    - `x`, `y`: the last (finite) iterates, pytrees like x0 and y0; type checkers know them as
        `Solution[X, Y]`. What was an array of NumPy is one of JAX.
    - `result`: how the run ended, a `Result`; `message` says it in words.
    - `history`, `ledger`: what was recorded, and the totals.
    - `state`: the solver's whole state, to go on from.
    - `kept`: the same, with one row for all clients of a federation where they agree; x, y and
        state are made of it when they are asked for.
    - `seconds`: the time of the run when each row of the history was written, without compiling.
    - `convergence`: what the run saw of its own convergence, a `Convergence`; `converged` is its
        verdict: True, False, or None where it cannot be told. A run that is completed need not have
        converged.

    !!! example
        ```python
        solution = aipod.solve(problem, solver, x0, y0, 100, key=jax.random.key(0))
        x, y = solution.feasible()
        solution.result, solution.converged, solution.ledger.projections
        print(solution)
        solution.save("solution.npz")  # aipod.load reads it
        ```
    """

    result: Result
    message: str
    history: History
    ledger: Ledger
    kept: State = dataclasses.field(repr=False)
    seconds: np.ndarray
    problem: Bilevel = dataclasses.field(repr=False)
    convergence: Convergence = dataclasses.field(default_factory=Convergence, repr=False)
    keeping: Keeping | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def x(self) -> X:
        return release(self._points[0])

    @functools.cached_property
    def y(self) -> Y:
        return release(self._points[1])

    @functools.cached_property
    def _points(self) -> tuple[PyTree, PyTree]:
        if self.keeping is None:
            return self.kept.x, self.kept.y
        return self.keeping.points(self.kept)

    @functools.cached_property
    def state(self) -> State:
        return self.kept if self.keeping is None else self.keeping.whole(self.kept)

    @property
    def converged(self) -> bool | None:
        """Whether the run has converged; None where that cannot be told."""
        return self.convergence.converged

    def feasible(self) -> tuple[X, Y]:
        """(x, y) projected on the upper set, and on the lower set at that x.

        Raises `ValueError` where the lower set is empty at that x.
        """
        x, y = self._points
        x = self.problem.upper_set.project(x)
        check_nonempty(self.problem.lower_set, y, x)
        return release(x), release(self.problem.lower_set.project(y, x))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes x, y, history and ledger to one `.npz` file, which `aipod.load` reads."""
        return save(path, self)

    def __repr__(self) -> str:
        last = ", ".join(f"{k}={v:.6g}" for k, v in self.history.last().items())
        return f"Solution({self.result.name}: {self.message} {last})"

    def __str__(self) -> str:
        points, sets = (self.kept.x, self.kept.y), (self.problem.upper_set, self.problem.lower_set)
        if self.keeping is not None:
            sets = self.keeping.sets(self.problem, points)
        off = {
            "upper set": sets[0].residual(points[0]),
            "lower set": sets[1].residual(points[1], points[0]),
        }
        return table(self.message, self.convergence, self.ledger, self.seconds, off)


def check_nonempty(lower_set: AbstractSet, y: PyTree, x: PyTree) -> None:
    """Raises `ValueError` when a coupling h(x) has left the range of A: then no y is feasible."""
    rows, rank = lower_set.constraints(y)
    if lower_set.coupled and (rows is None or rows != rank):
        lower_set.check(y, x, name="lower_set")


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
