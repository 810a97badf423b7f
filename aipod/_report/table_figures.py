"""The figure of Table 1: error against samples."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aipod._report.style import look
from aipod.runs._figures import save

_WORDS = {
    "none": "without constraints",
    "upper": "x constrained",
    "lower": "y constrained",
    "both": "both constrained",
    "coupled": "both, x moves y's",
}


def table_figure(summary: dict[str, Any], folder: Path) -> list[Path]:
    """Draws one column per problem, with the methods that accept it."""
    problems = [p for p in _WORDS if any(row["problem"] == p for row in summary["rows"])]
    labels = list(dict.fromkeys(row["method"] for row in summary["rows"]))

    def draw(figure: Figure) -> None:
        places = np.atleast_1d(figure.subplots(1, len(problems), sharey=True))
        for place, problem in zip(places, problems, strict=True):
            for row in (row for row in summary["rows"] if row["problem"] == problem):
                index = labels.index(row["method"])
                place.loglog(
                    row["curve"]["samples"],
                    row["curve"]["error"],
                    **look(index),
                    marker="o" if row["noise"] else "s",
                    markersize=3,
                    label=row["method"] if row["noise"] else f"{row['method']} (no noise)",
                )
            place.set_title(_WORDS[problem])
            place.set_xlabel("samples")
        places[0].set_ylabel("average of ‖∇F‖² over the run")
        found: dict[str, Any] = {}
        for place in places:
            found |= dict(zip(*reversed(place.get_legend_handles_labels()), strict=True))
        columns = min(5, len(found))
        figure.legend(found.values(), found, loc="outside lower center", ncols=columns)

    return save(folder, "table1", (max(4.5, 2.7 * len(problems)), 3.9), draw)
