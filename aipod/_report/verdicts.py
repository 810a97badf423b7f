"""What runs say about their own convergence, as a table of the page."""

from typing import Any

from aipod._report.collect import Group, Section
from aipod._report.tables import table
from aipod.experiments.numbers import number

_WORDS = {True: "yes", False: "no", None: "unknown"}


def verdicts(section: Section) -> str:
    """One line for each group, of its first seed; empty where no run says anything."""
    lines = [line for group in section.groups if (line := _line(group)) is not None]
    if not lines:
        return ""
    shown = table(["", "converged", "stationarity", "because", "advice"], lines, "values words")
    return f"<h3>Convergence</h3>\n{shown}"


def _line(group: Group) -> list[str] | None:
    said: Any = group.runs[0].summary.get("convergence")
    # The folder may come from somebody else.
    if not isinstance(said, dict) or not isinstance(said.get("reason"), str):
        return None
    value = said.get("stationarity")
    shown = number(float(value)) if isinstance(value, int | float) else "not measured"
    verdict = said.get("converged")
    word = _WORDS[verdict if isinstance(verdict, bool) else None]
    return [group.label, word, shown, said["reason"], str(said.get("advice") or "")]
