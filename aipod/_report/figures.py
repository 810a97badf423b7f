"""Figures for paper and screen, with Matplotlib: PNG and SVG."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from aipod._report.collect import Group, Reference, Section, View
from aipod._report.curves import curve, thinned
from aipod._report.reading import AXES
from aipod._report.style import COLOURS, REFERENCE, look
from aipod.experiments.numbers import setting, tick
from aipod.runs._figures import save

# Points of a line; more would only make the files larger.
_POINTS = 600


def comparison_figure(section: Section, folder: Path) -> list[Path]:
    """Draws the first metric: one column per view, one row per axis (the paper's Figure 1)."""
    metric, axes = section.metrics[0], section.axes
    width = max(4.2, 3.7 * len(section.views))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(axes), len(section.views), squeeze=False, sharey=True)
        for column, view in enumerate(section.views):
            for row, axis in enumerate(axes):
                place = grid[row][column]
                for group in view.groups:
                    _line(place, group, axis, metric)
                for index, reference in enumerate(view.references):
                    _reference_line(place, reference, axis, metric, index)
                _finish(place, axis, metric if column == 0 else None, metric["log"])
            grid[0][column].set_title(view.title)
            grid[-1][column].legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=_columns(view)
            )

        seeds = max(len(group.runs) for group in section.groups)
        if seeds > 1:
            note = f"lines: median of {seeds} seeds; shaded: their range"
            figure.supxlabel(note, fontsize=8, color="#555555")

    legend = 0.2 * max(-(-len(_labels(view)) // _columns(view)) for view in section.views)
    return save(folder, "comparison", (width, 2.5 * len(axes) + legend + 0.2), draw)


def run_figure(section: Section, folder: Path) -> list[Path]:
    """Draws one run: all metrics against outer steps, and the first metric against its cost."""
    group, cost = section.groups[0], section.axes[0]
    logarithmic = [metric for metric in section.metrics if metric["log"]]
    linear = [metric for metric in section.metrics if not metric["log"]]
    parts = [(part, "step") for part in (logarithmic, linear) if part]
    if cost != "step":
        parts.append(([section.metrics[0]], cost))

    def draw(figure: Figure) -> None:
        for place, (metrics, axis) in zip(
            np.atleast_1d(figure.subplots(1, len(parts))), parts, strict=True
        ):
            for metric in metrics:
                _metric_line(place, group, axis, metric, section.metrics.index(metric))
            _finish(place, axis, metrics[0] if len(metrics) == 1 else None, metrics[0]["log"])
            if len(metrics) > 1:
                place.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))

    rows = max(len(metrics) for metrics, _ in parts)
    title = f"{section.experiment}: {group.label}, seed {group.runs[0].summary['seed']}"
    return save(folder, "metrics", (3.6 * len(parts), 2.9 + 0.19 * rows), draw, title)


def _line(place: Axes, group: Group, axis: str, metric: dict[str, Any]) -> None:
    across, up = curve(group, axis).middle, curve(group, metric["name"])
    rows = thinned(len(across), _POINTS)
    drawn = look(group.index)
    place.plot(across[rows], up.middle[rows], **drawn, label=group.label)
    if len(group.runs) > 1:
        shade: Any = (up.low[rows], up.high[rows])
        place.fill_between(across[rows], *shade, color=drawn["color"], alpha=0.18, linewidth=0)


def _reference_line(
    place: Axes, reference: Reference, axis: str, metric: dict[str, Any], index: int
) -> None:
    across, up = reference.columns.get(axis), reference.columns.get(metric["name"])
    # Without values for this axis the line appears in the legend only.
    shown = ((), ()) if across is None or up is None else (across, up)
    line = ("dotted", (0, (1, 2.6)))[index % 2]
    place.plot(*shown, color=REFERENCE, linestyle=line, linewidth=1.4, label=reference.label)


def _metric_line(place: Axes, group: Group, axis: str, metric: dict[str, Any], index: int) -> None:
    """Draws a metric of one run as a solid line; noisy dashed lines are hard to follow."""
    across, up = curve(group, axis).middle, curve(group, metric["name"]).middle
    rows = thinned(len(across), _POINTS)
    width = 1.8 if index == 0 else 0.9
    colour = COLOURS[index % len(COLOURS)]
    place.plot(across[rows], up[rows], color=colour, linewidth=width, label=metric["label"])


def _finish(place: Axes, axis: str, metric: dict[str, Any] | None, logarithmic: bool) -> None:
    place.set_xlabel(AXES[axis])
    if metric is not None:
        place.set_ylabel(metric["label"])
    if logarithmic:
        place.set_yscale("log")
        low, high = place.get_ylim()
        # Plain numbers at powers of ten, and at 2 and 5 times those if the range is short.
        place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        place.yaxis.set_minor_locator(NullLocator())
        place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: setting(value)))
    place.xaxis.set_major_formatter(FuncFormatter(tick))
    place.set_axisbelow(True)


def _labels(view: View) -> list[str]:
    return [group.label for group in view.groups] + [one.label for one in view.references]


def _columns(view: View) -> int:
    return 2 if max(map(len, _labels(view))) < 22 else 1
