"""Figures of measured rates: costs against errors, with lines of the claimed slopes."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from aipod._report.style import look
from aipod.experiments.numbers import setting
from aipod.runs._figures import save

_PANELS = (
    ("samples", ("samples",), (2.0,)),
    ("lower projections", ("lower_projections",), (2.0, 1.5)),
    ("upper projections (x, adjoint)", ("upper_projections", "adjoint_projections"), (2.0, 1.5)),
)


def rates_figure(summary: dict[str, Any], folder: Path) -> list[Path]:
    """Draws one row per problem and one column per cost; the effect of T has its own figure."""
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
    costs = {label: np.sum([c[part] for part in parts], axis=0) for label, c in curves.items()}
    for index, (label, curve) in enumerate(curves.items()):
        place.loglog(
            curve["error"],
            costs[label],
            **look(index),
            marker="o",
            markersize=3,
            label=label,
        )
    # The guides start below the lowest curve at the first method's largest error.
    first = next(iter(curves.values()))["error"]
    near = [
        costs[label][np.argmin(np.abs(np.log(np.divide(curve["error"], first[0]))))]
        for label, curve in curves.items()
    ]
    reach = np.array([first[0], min(first)])
    for slope in slopes:
        guide = 0.35 * min(near) * (first[0] / reach) ** slope
        place.loglog(reach, guide, color="#777777", linewidth=0.8)
        place.annotate(
            rf"$\varepsilon^{{-{slope:g}}}$",
            (reach[1], guide[1]),
            xytext=(-4, -7),
            textcoords="offset points",
            fontsize=8,
            color="#333333",
            ha="right",
            va="top",
        )
    place.invert_xaxis()
    plain_ticks(place)
    place.set_xlabel("average of ‖∇F‖² over the run (ε)")


def plain_ticks(place: Axes) -> None:
    """Plain numbers on a logarithmic axis of errors."""
    place.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    place.xaxis.set_minor_locator(NullLocator())
    place.xaxis.set_major_formatter(FuncFormatter(lambda value, _: setting(value)))


def _draw_steps(summary: dict[str, Any], several: list[str]) -> Any:
    def draw(figure: Figure) -> None:
        places = np.atleast_1d(figure.subplots(1, len(several), sharey=True))
        for place, name in zip(places, several, strict=True):
            for index, (label, curve) in enumerate(summary["curves"][name].items()):
                place.loglog(
                    curve["upper_projections"],
                    curve["error"],
                    **look(index),
                    marker="o",
                    markersize=3,
                    label=label,
                )
            place.set_title(name)
            place.set_xlabel("projections of x")
        places[0].set_ylabel("average of ‖∇F‖² over the run")
        places[-1].legend(loc="upper right")

    return draw
