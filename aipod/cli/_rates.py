"""`aipod rates`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from aipod._report.rate_figures import rates_figure
from aipod.cli._opening import free_folder
from aipod.cli._show import err, out
from aipod.experiments.compare import MOST_SEEDS
from aipod.experiments.studies.rates import METHODS, PROBLEMS, exponents, markdown, measure
from aipod.experiments.toml import dump
from aipod.experiments.values import LARGEST, shown, suggestion
from aipod.runs._environment import environment
from aipod.runs._folder import RunFolder, finite


def rates(
    path: Path | None,
    *,
    steps: int,
    seeds: int,
    seed: int,
    problems: str | None,
    methods: str | None,
    force: bool,
    as_json: bool,
) -> int:
    chosen = {
        "problems": names(problems, PROBLEMS, "problems"),
        "methods": names(methods, tuple(METHODS), "methods"),
    }
    for name, value, least, most in (
        ("steps", steps, 1000, LARGEST),
        ("seeds", seeds, 1, MOST_SEEDS),
        ("seed", seed, 0, LARGEST),
    ):
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise ValueError(f"--{name} must be {bound}, got {value}.")
    folder = RunFolder(path) if path is not None else free_folder("rates")
    config = {"steps": steps, "seeds": seeds, "seed": seed} | chosen
    folder.create("# What `aipod rates` measured here.\n\n" + dump(config), force=force)
    summary = measure(
        steps,
        seeds,
        seed,
        problems=chosen["problems"],
        chosen=chosen["methods"],
        told=lambda words: err.print(escape(words)),
    )
    summary |= {"environment": environment()}
    conclude(folder, summary, markdown(summary))
    rates_figure(summary, folder.figures)
    tell(folder, summary, _show, as_json=as_json)
    return 0


def tell(
    folder: RunFolder,
    summary: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    *,
    as_json: bool,
) -> None:
    """Prints the summary, as JSON or as tables."""
    if as_json:
        print(json.dumps(finite(summary | {"folder": str(folder.path)})))
        return
    show(summary)
    shown = escape(str(folder.path))
    err.print(f"written to {shown}: table.md, summary.json and figures; next: aipod report {shown}")


def names(given: str | None, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Splits a list at its commas and checks the names; all known names if there is no list."""
    if given is None:
        return tuple(known)
    found = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in found:
        if name not in known:
            raise ValueError(
                f"--{what}: there is no {shown(name)}.{suggestion(name, known)} "
                f"There are: {', '.join(known)}."
            )
    return found


def conclude(folder: RunFolder, summary: dict[str, Any], table: str) -> None:
    """Writes summary.json and table.md."""
    folder.write_summary(summary)
    (folder.path / "table.md").write_text(table, encoding="utf-8")


def _show(summary: dict[str, Any]) -> None:
    out.print(f"[bold]Exponents e of cost ~ ε^−e, or of T^e[/bold] ({summary['seeds']} seeds)\n")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in summary["rows"]:
        groups.setdefault(f"{row['problem']}: {row['method']}", []).append(row)
    for who, rows in groups.items():
        out.print(f"[bold]{escape(who)}[/bold]")
        out.print(_table(rows))
        for words in dict.fromkeys(row["note"] for row in rows if row["measured"] is None):
            out.print(f"  {escape(words)}.\n")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True, min_width=34)
    for name in ("claimed", "counted", "measured"):
        table.add_column(name, justify="right")
    table.add_column("95 % interval", justify="right", no_wrap=True, min_width=14)
    for row in rows:
        table.add_row(f"  {escape(row['cost'])}", *exponents(row))
    table.add_row()
    return table
