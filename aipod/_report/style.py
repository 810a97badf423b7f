"""Colours and line styles that print well and that colour-blind readers can tell apart."""

from typing import Any

# Okabe and Ito's palette without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# For dark pages: yellow instead of black, and a lighter blue.
DARK_COLOURS = ("#4DA6DB", "#E8743B", "#2BC293", "#D99BBE", "#E69F00", "#9CD3F2", "#F0E442")
# For reference curves.
REFERENCE, DARK_REFERENCE = "#8a8a8a", "#a8a8a8"
# Matplotlib's and Plotly's names for the same line styles.
LINES: tuple[tuple[str | tuple[float, tuple[float, ...]], str], ...] = (
    ("solid", "solid"),
    ((0, (5, 1.5)), "dash"),
    ((0, (1, 1.2)), "dot"),
    ((0, (5, 1.5, 1, 1.5)), "dashdot"),
    ((0, (9, 2)), "longdash"),
)


def look(index: int) -> dict[str, Any]:
    """Matplotlib's arguments for the colour and line style of curve number `index`."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)][0]}
