"""The two consoles and the tables: results go to stdout, everything else to stderr."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aipod._report.reading import AXES
from aipod.experiments.numbers import number, percent, ratio

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def run_table(summary: dict[str, Any]) -> Table:
    """The main numbers of one run."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("result", escape(summary["result"]))
    table.add_row("outer steps", number(summary["steps"]))
    for metric in summary["metrics"]:
        if metric["name"] in summary["last"]:
            table.add_row(escape(metric["label"]), number(summary["last"][metric["name"]], 4))
    for name, label in AXES.items():
        total = summary["ledger"].get(name)
        if total:
            table.add_row(label, number(total))
    table.add_row(AXES["seconds"], ratio(summary["seconds"]))
    return table


def comparison_table(panel: dict[str, Any], metric: str, cost: str) -> Table:
    """One panel of a comparison; ratios are relative to its first row."""
    seeds = max(row["seeds"] for row in panel["rows"])
    title = f"{panel['title'] or 'Comparison'} (median of {seeds})" if seeds > 1 else panel["title"]
    table = Table(box=box.SIMPLE, pad_edge=False, title=escape(title), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in (metric, "ratio", "at most", cost, "share"):
        table.add_column(escape(name), justify="right")
    for row in panel["rows"]:
        diverged = row["results"].get("diverged", 0)
        table.add_row(
            escape(row["label"] + (f", {diverged} diverged" if diverged else "")),
            number(row["value"], 4),
            ratio(row["ratio"]),
            ratio(row["worst"]),
            number(row["cost"], 0),
            percent(row["cost_ratio"]),
        )
    return table
