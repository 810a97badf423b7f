"""A Matplotlib figure as the PNG and the SVG of a run folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from aipod._misc.files import atomic

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "svg.hashsalt": "aipod",
}


def save(
    folder: Path,
    name: str,
    size: tuple[float, float],
    draw: Callable[[Figure], None],
    title: str = "",
) -> list[Path]:
    """Draws a figure and writes it as PNG and SVG.

    **Arguments:**

    - `folder`: where to; it is made if need be.
    - `name`: of both files, without the ending.
    - `size`: width and height in inches.
    - `draw`: draws on an empty figure.
    - `title`: stands above the figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=size, layout="constrained")
        try:
            draw(figure)
            if title:
                figure.suptitle(title, fontsize=10, fontweight="bold")
            for kind, extra in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
                path = folder / f"{name}.{kind}"
                with atomic(path) as file:
                    figure.savefig(file, format=kind, **extra)
                written.append(path)
        finally:
            plt.close(figure)
    return written
