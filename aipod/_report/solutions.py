"""`aipod.report`: the page of the command for solutions of one's own script."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aipod._misc.extras import explain
from aipod.runs._environment import environment
from aipod.runs._results import as_columns, as_summary
from aipod.solving import RECORDED, SavedSolution, Solution

AnySolution = Solution | SavedSolution


def report(
    solution: AnySolution | Sequence[AnySolution] | Mapping[str, Any],
    path: str | os.PathLike[str] = "report.html",
    *,
    title: str = "my problem",
    about: str = "",
    larger: Sequence[str] = ("accuracy",),
    force: bool = False,
) -> Path:
    """Writes one HTML page about solutions, with charts that open without a network.

    It draws what was recorded against steps, projections, samples, rounds, bytes and seconds.

    **Arguments:**

    - `solution`: a solution of `solve` or `load`; a list of them with one for each seed; or a
        dictionary from names to either, which are then compared with the first.
    - `path`: the page. An older report is replaced, any other file only with `force`.
    - `title`, `about`: a heading, and a sentence below it.
    - `larger`: the metrics of which a larger value is better.

    Returns the path.

    !!! example
        ```python
        aipod.report(solution, "report.html", title="three numbers")
        ```
    """
    named = solution if isinstance(solution, Mapping) else {"": solution}
    groups = {str(name): _listed(found) for name, found in named.items()}
    if not groups or not all(groups.values()):
        raise ValueError("report: there is no solution to report on.")
    try:
        from aipod._report.collect import section_of
        from aipod._report.page import write_report
        from aipod._report.reading import Run

        runs = [
            Run(Path(), *_described(one, name or "solution", seed, title, about, larger))
            for name, seeds in groups.items()
            for seed, one in enumerate(seeds)
        ]
        page = Path(path)
        write_report([section_of(runs)], page, force=force)
    except ImportError as error:
        raise ImportError(f"report draws with plotly: {explain(error) or error}") from error
    return page


def _listed(found: Any) -> list[AnySolution]:
    listed = list(found) if isinstance(found, Sequence) else [found]
    for one in listed:
        if not isinstance(one, Solution | SavedSolution):
            raise ValueError(
                f"report: give it what aipod.solve returns, or several, got {type(one).__name__}."
            )
        if not len(one.seconds):
            raise ValueError(
                "report: a solution has no recorded row: solve with more steps, or a smaller every."
            )
    return listed


def _described(
    one: AnySolution, name: str, seed: int, title: str, about: str, larger: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summary and the columns that a run folder would hold."""
    columns = as_columns(one)
    own = [n for n, c in one.history.items() if n not in (*RECORDED, "curvature") and c.ndim == 1]
    metrics = [
        {
            "name": metric,
            "label": metric.replace("_", " "),
            "log": None,
            "better": "larger" if metric in larger else "smaller",
        }
        for metric in own or ["projections"]
    ]
    summary = as_summary(one, columns, metrics) | {
        "experiment": title,
        "solver": name,
        "seed": seed,
        "config": {"solver": name},
        "axes": ["rounds" if "rounds" in columns else "projections", "step"],
        "environment": environment(),
        "about": about,
    }
    return summary, columns
