"""What a solution looks like: its history as a figure, and its table with it in a notebook."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from aipod._misc.extras import explain
from aipod.solving._history import History
from aipod.solving._ledger import PROJECTIONS, RECORDED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What can be drawn against, and the words on the axis.
_AXES = {
    "step": "outer steps",
    "steps": "outer steps",
    "projections": "projections, all kinds",
    "lower_projections": "projections of y",
    "upper_projections": "projections of x",
    "adjoint_projections": "projections in the adjoint",
    "samples": "samples",
    "rounds": "communication rounds",
    "bytes": "bytes of one client, both ways",
    "seconds": "computing time (s)",
}
_COLOUR = "#0072B2"  # of Okabe and Ito's palette
_MOST_IN_A_NOTEBOOK = 4


class Shown:
    """What `Solution` and `SavedSolution` show of themselves: a figure, and HTML for a notebook."""

    history: History
    seconds: np.ndarray

    def plot(self, against: str = "step", metrics: str | Sequence[str] | None = None) -> "Figure":
        """Draws the recorded metrics, one beside the other; returns the Matplotlib figure.

        **Arguments:**

        - `against`: `step`, `projections` (or one kind, such as `lower_projections`), `samples`,
            `seconds`, and in a federation `rounds` or `bytes`.
        - `metrics`: which columns of the history to draw; all that `record` returned by default.
        """
        try:
            import matplotlib
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(f"plot draws with Matplotlib: {explain(error)}") from error
        figure = plt.figure(layout="constrained")
        draw(figure, self.history, self.seconds, against, metrics)
        if "inline" in matplotlib.get_backend():
            plt.close(figure)  # a notebook shows what is returned, and would show it twice
        return figure

    def _repr_html_(self) -> str:
        """The table and the figure, for notebooks."""
        shown = f'<pre style="font-family: monospace">{escape(str(self))}</pre>'
        names = _metrics(self.history)[:_MOST_IN_A_NOTEBOOK]
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return shown
        if not names or not len(self.seconds):
            return shown
        figure = Figure(layout="constrained")
        draw(figure, self.history, self.seconds, "step", names)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        source = base64.b64encode(file.getvalue()).decode("ascii")
        return f'{shown}<img alt="{escape(", ".join(names))}" src="data:image/png;base64,{source}">'


def draw(
    figure: "Figure",
    history: History,
    seconds: np.ndarray,
    against: str = "step",
    metrics: str | Sequence[str] | None = None,
) -> None:
    """Draws on an empty figure."""
    across = _axis(history, seconds, against)
    names = [metrics] if isinstance(metrics, str) else list(metrics or _metrics(history))
    if not len(across) or not names:
        raise ValueError(
            "there is nothing to draw: let solve record something, as in "
            "record=lambda x, y: {'loss': ...}."
        )
    figure.set_size_inches(3.6 * len(names) + 0.4, 3.0)
    for place, name in zip(
        np.atleast_1d(figure.subplots(1, len(names))), names, strict=True
    ):  # history[name] says what there is when a name is wrong
        values = np.asarray(history[name])
        flat = values.reshape(len(values), -1)
        place.plot(across, flat, color=_COLOUR if flat.shape[1] == 1 else None, linewidth=1.4)
        finite = flat[np.isfinite(flat)]
        if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
            place.set_yscale("log")
        place.set_xlabel(_AXES[against])
        place.set_title(name.replace("_", " "), fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
        place.grid(color="#d9d9d9", linewidth=0.6)


def _axis(history: Mapping[str, np.ndarray], seconds: np.ndarray, against: str) -> np.ndarray:
    if against == "seconds":
        return np.asarray(seconds)
    parts = {"steps": ("step",), "projections": PROJECTIONS, "bytes": ("bytes_up", "bytes_down")}
    wanted = parts.get(against, (against,))
    if against not in _AXES or not set(wanted) <= set(history):
        known = [n for n in _AXES if n == "seconds" or set(parts.get(n, (n,))) <= set(history)]
        raise ValueError(
            f"plot: against must be one of {', '.join(known)}, got {against!r}"
            + (": that is counted in a federation." if against in ("rounds", "bytes") else ".")
        )
    return np.sum([history[name] for name in wanted], axis=0)


def _metrics(history: Mapping[str, np.ndarray]) -> list[str]:
    """What `record` returned; the curvature where it returned nothing, and else the projections."""
    own = [name for name in history if name not in (*RECORDED, "curvature")]
    counted = [name for name in ("curvature", "samples", *PROJECTIONS) if name in history]
    return own or counted[:1]
