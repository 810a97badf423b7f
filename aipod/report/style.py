"""Colours and lines that print well and that the colour-blind can tell apart."""

from typing import Any

# Okabe and Ito's palette without its yellow, which white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# On a dark page black becomes the palette's yellow, and the dark blue a lighter one.
DARK_COLOURS = ("#4DA6DB", "#E8743B", "#2BC293", "#D99BBE", "#E69F00", "#9CD3F2", "#F0E442")
# For what others have measured.
REFERENCE, DARK_REFERENCE = "#8a8a8a", "#a8a8a8"
# Matplotlib's and Plotly's names for the same lines.
LINES: tuple[tuple[str | tuple[float, tuple[float, ...]], str], ...] = (
    ("solid", "solid"),
    ((0, (5, 1.5)), "dash"),
    ((0, (1, 1.2)), "dot"),
    ((0, (5, 1.5, 1, 1.5)), "dashdot"),
    ((0, (9, 2)), "longdash"),
)


def look(index: int) -> dict[str, Any]:
    """The colour and the line of the curve with this number, for Matplotlib."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)][0]}
