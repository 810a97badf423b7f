"""The results of `aipod rates` and `aipod compare table1` as sections of the page."""

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from aipod._report.pictures import picture
from aipod._report.reading import check_summary, results
from aipod._report.tables import table
from aipod.experiments.numbers import number

_TITLES = {"rates": "Measured rates", "table1": "Table 1, measured"}
_PICTURES = {
    "rates": {
        "rates": "Costs against the average error of a run; the straight lines have the slopes "
        "that the paper claims.",
        "steps": "The effect of T steps on x for each projection.",
    },
    "table1": {"table1": "The average error of a run against its samples, for each problem."},
}


@dataclasses.dataclass(frozen=True)
class Study:
    """A folder with measurements; `tables` holds the cells of its table.md."""

    path: Path
    summary: dict[str, Any]
    tables: tuple[list[list[str]], ...]

    @property
    def title(self) -> str:
        return _TITLES[self.summary["kind"]]


def studies(paths: Sequence[Path]) -> tuple[Study, ...]:
    """Returns the studies at or below these folders."""
    return tuple(
        Study(folder, _checked(folder, summary), _tables(folder / "table.md"))
        for folder, summary in results(paths).items()
        if summary["kind"] in _TITLES
    )


def _checked(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    check_summary(folder, summary, {"seeds": int, "steps": int, "environment": {str: object}})
    return summary


def _tables(file: Path) -> tuple[list[list[str]], ...]:
    """Returns the cells of every table in a Markdown file, the head first."""
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}: measure it again with --force.")
    found: list[list[list[str]]] = [[]]
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("|---"):
            continue
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    tables = [lines for lines in found if lines]
    if not tables or any(len(line) != len(lines[0]) for lines in tables for line in lines):
        raise ValueError(f"{file} is damaged: measure it again with --force.")
    return tuple(tables)


def section(index: int, study: Study) -> str:
    """Returns the study as HTML."""
    shown = "\n".join(table(head, body) for head, *body in study.tables)
    drawn = "\n".join(
        picture(study.path, name, words) for name, words in _PICTURES[study.summary["kind"]].items()
    )
    return f"""<section id="study-{index}" aria-label="{escape(study.title)}">
<h2>{escape(study.title)}</h2>
<p class="quiet">{escape(_origin(study))}</p>
{drawn}
{shown}
</section>"""


def _origin(study: Study) -> str:
    seeds, steps = (number(study.summary[name]) for name in ("seeds", "steps"))
    return (
        f"Runs of up to {steps} outer steps, {seeds} of each; the table is table.md in the folder."
    )
