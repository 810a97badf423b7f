"""Figures of measured rates: costs against errors, with the slopes that are claimed."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aipod.report.figures import save
from aipod.report.style import COLOURS, LINES

_PANELS = (
    ("samples", ("samples",), (2.0,)),
    ("lower projections", ("lower_projections",), (2.0, 1.5)),
    ("upper projections, x and adjoint", ("upper_projections", "adjoint_projections"), (2.0, 1.5)),
)


def rates_figure(summary: dict[str, Any], folder: Path) -> list[Path]:
    """A row for each problem, a column for each cost; the effect of T in a figure of its own."""
    written = []
    problems = [name for name in ("synthetic", "logistic") if name in summary["curves"]]
    if problems:

        def draw(figure: Figure) -> None:
            grid = figure.subplots(len(problems), len(_PANELS), squeeze=False)
            for places, problem in zip(grid, problems, strict=True):
                curves = summary["curves"][problem]
                for place, (title, parts, slopes) in zip(places, _PANELS, strict=True):
                    _panel(place, curves, parts, slopes)
                    place.set_title(f"{problem}: {title}" if len(problems) > 1 else title)
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3)

        written += save(folder, "rates", (10.5, 3.1 * len(problems) + 0.7), draw)
    several = [name for name in summary["curves"] if name.startswith("E-AiPOD")]
    if several:
        written += save(folder, "steps", (4.2 * len(several), 3.3), _draw_steps(summary, several))
    return written


def _panel(
    place: Axes, curves: dict[str, Any], parts: tuple[str, ...], slopes: tuple[float, ...]
) -> None:
    ends = []
    for index, (label, curve) in enumerate(curves.items()):
        cost = np.sum([curve[part] for part in parts], axis=0)
        place.loglog(
            curve["error"],
            cost,
            color=COLOURS[index % len(COLOURS)],
            linestyle=LINES[index % len(LINES)][0],
            marker="o",
            markersize=3,
            label=label,
        )
        ends.append((curve["error"][0], cost[0]))
    start = max(end[0] for end in ends), 0.45 * min(end[1] for end in ends)
    reach = np.array([start[0], min(min(curve["error"]) for curve in curves.values())])
    for slope in slopes:
        guide = start[1] * (start[0] / reach) ** slope
        place.loglog(reach, guide, color="#777777", linewidth=0.8)
        place.annotate(
            f"ε^−{slope:g}", (reach[1], guide[1]), fontsize=8, color="#555555", ha="right", va="top"
        )
    place.invert_xaxis()
    place.set_xlabel("average of ‖∇F‖² over the run (ε)")


def _draw_steps(summary: dict[str, Any], several: list[str]) -> Any:
    def draw(figure: Figure) -> None:
        places = np.atleast_1d(figure.subplots(1, len(several), sharey=True))
        for place, name in zip(places, several, strict=True):
            for index, (label, curve) in enumerate(summary["curves"][name].items()):
                colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)][0]
                place.loglog(
                    curve["upper_projections"],
                    curve["error"],
                    color=colour,
                    linestyle=line,
                    marker="o",
                    markersize=3,
                    label=label,
                )
            place.set_title(name)
            place.set_xlabel("projections of x")
        places[0].set_ylabel("average of ‖∇F‖² over the run")
        places[-1].legend(loc="upper right")

    return draw
