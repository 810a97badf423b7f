"""How a run ended."""

import enum


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
    plateau = "F no longer decreased for the outer steps given by Stop(patience=)."
    stopped = "A callback ended the run."
    out_of_time = "The time given by Stop(seconds=) is over: resume, or allow more."
    out_of_projections = "The projections given by Stop(projections=) are spent: allow more."
    interrupted = "The run was interrupted; everything up to there is kept: resume it."
    infeasible = "The lower set is empty at the last x: it moves with x, and has no point there."
    diverged = "An iterate became NaN or infinite: use smaller steps, or aipod.Curvature()."

    @property
    def ok(self) -> bool:
        """Whether the solution can be used: anything but divergence or an empty lower set."""
        return self not in (Result.diverged, Result.infeasible)
