"""`aipod compare table1`."""

from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from aipod._report.table_figures import table_figure
from aipod.cli._opening import free_folder
from aipod.cli._rates import conclude, names, tell
from aipod.cli._show import err, out
from aipod.experiments.compare import MOST_SEEDS
from aipod.experiments.numbers import short
from aipod.experiments.studies.table1 import COSTS, NAMES, PROBLEMS, exponents, markdown, measure
from aipod.experiments.toml import dump
from aipod.experiments.values import whole, within
from aipod.runs._environment import environment
from aipod.runs._folder import RunFolder

_TAKES = {"experiment": "", "solvers": None, "seeds": 8, "steps": 100_000, "seed": 0}


def table1(
    given: dict[str, Any], path: Path | None, *, resume: bool, force: bool, as_json: bool
) -> int:
    for name in given:
        if name not in _TAKES:
            raise ValueError(
                f"compare table1 has no option {name}: it takes --solvers, --seeds, --steps, "
                "--seed, --out, --force and --json."
            )
    if resume:
        raise ValueError("compare table1 cannot be resumed: repeat it with --force.")
    chosen = _TAKES | given
    if not isinstance(chosen["solvers"], str | None):
        raise ValueError("solvers must be names with commas between, such as aipod,ttsa.")
    methods = names(chosen["solvers"], NAMES, "solvers")
    steps, seeds = (whole(chosen[name], name) for name in ("steps", "seeds"))
    seed = within(chosen["seed"], "seed", 0)
    if steps < 10_000 or not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(
            "compare table1 needs --steps of at least 10000, and --seeds from 1 to "
            f"{MOST_SEEDS}, got {steps} and {seeds}."
        )
    folder = RunFolder(path) if path is not None else free_folder("table1")
    config = {"steps": steps, "seeds": seeds, "seed": seed, "solvers": methods}
    folder.create("# What `aipod compare table1` measured here.\n\n" + dump(config), force=force)
    summary = measure(
        steps, seeds, seed, chosen=methods, told=lambda words: err.print(escape(words))
    )
    summary |= {"environment": environment()}
    conclude(folder, summary, markdown(summary))
    table_figure(summary, folder.figures)
    tell(folder, summary, _show, as_json=as_json)
    return 0


def _show(summary: dict[str, Any]) -> None:
    accepted = Table(box=box.SIMPLE, pad_edge=False, title="Accepted", title_justify="left")
    for name in ("", "noise", *PROBLEMS):
        accepted.add_column(name, no_wrap=True)
    for method in summary["methods"]:
        words = [method["noise"], *(method["refused"][p] for p in PROBLEMS)]
        marks = ("yes" if word is None else "[dim]no[/dim]" for word in words)
        accepted.add_row(escape(method["label"]), *marks)
    out.print(accepted)
    for refused in _refusals(summary):
        out.print(escape(refused))
    for problem in PROBLEMS:
        rows = [row for row in summary["rows"] if row["problem"] == problem]
        if rows:
            out.print(_costs(problem, rows, summary["accuracies"]))
    out.print(_exponents(summary["rows"]))


def _refusals(summary: dict[str, Any]) -> list[str]:
    """The methods' error messages, each once."""
    every = [
        words
        for method in summary["methods"]
        for words in (method["noise"], *method["refused"].values())
    ]
    return list(dict.fromkeys(words for words in every if words is not None))


def _costs(problem: str, rows: list[dict[str, Any]], accuracies: list[float]) -> Table:
    title = f"Problem {problem}: what it takes until the average of ‖∇F‖² is at most ε"
    table = _plain_table(title)
    table.add_column("\nε =", no_wrap=True)
    for what in COSTS:
        for index, accuracy in enumerate(accuracies):
            # The name of the cost goes above its middle column.
            word = what.replace(" projections", "").capitalize() if index == 1 else ""
            head = f"{word}\n{accuracy:g}"
            table.add_column(head, justify="right", no_wrap=True, min_width=5)
    for row in rows:
        cells = [short(cost) for name in COSTS for cost in row[name]]
        table.add_row(_label(row), *cells)
    table.caption = "Upper: projections of x and inside the adjoint; lower: those of y"
    if not all(row["noise"] for row in rows):
        table.caption += "; *: without noise"
    table.caption_justify = "left"
    return table


def _exponents(rows: list[dict[str, Any]]) -> Table:
    table = _plain_table("The e of samples ~ ε^−e")
    table.add_column("", no_wrap=True)
    table.add_column("problem")
    for name in ("claimed", "measured", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(_label(row), row["problem"], *exponents(row))
    return table


def _plain_table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=f"\n{title}", title_justify="left")
    table.padding = (0, 0, 0, 1)
    return table


def _label(row: dict[str, Any]) -> str:
    return escape(row["method"] + ("" if row["noise"] else "*"))
