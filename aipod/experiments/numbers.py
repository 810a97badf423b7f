"""Formats numbers for tables, sentences and figures."""

import math
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """A measured value, rounded to some digits; whole numbers in full."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ratio(value: float | None) -> str:
    """Two decimals; empty for None."""
    return "" if value is None else f"{value:.2f}"


def percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.3g} %"


def interval(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def setting(value: Any) -> str:
    """A value of a configuration, without trailing zeros."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def rounded(cost: float | None) -> str:
    """An interpolated cost, rounded to two figures."""
    return "not reached" if cost is None else f"{float(f'{cost:.2g}'):,.0f}"


def short(cost: float | None) -> str:
    """A cost with two figures, such as 2.7k; a dash for None."""
    if cost is None:
        return "–"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if cost >= size:
            scaled = cost / size
            return f"{scaled:.2g}{letter}" if scaled < 99.5 else f"{scaled:.0f}{letter}"
    return f"{cost:.0f}"


def tick(value: float, position: int | None = None) -> str:
    """A tick label; the second argument is Matplotlib's."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,g} M"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:g}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    first, *rest = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(rest)
