"""What people see: results on standard output, everything on the way on standard error."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aipod.report.claims import percent
from aipod.report.curves import AXES

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def run_table(summary: dict[str, Any]) -> Table:
    """The figures that matter of one run."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("result", escape(summary["result"]))
    table.add_row("outer steps", f"{summary['steps']:,}")
    for metric in summary["metrics"]:
        if metric["name"] in summary["last"]:
            table.add_row(escape(metric["label"]), number(summary["last"][metric["name"]]))
    for name, label in AXES.items():
        total = summary["ledger"].get(name)
        if total:
            table.add_row(label, f"{total:,}")
    table.add_row(AXES["seconds"], f"{summary['seconds']:.2f}")
    return table


def comparison_table(panel: dict[str, Any], metric: str, cost: str) -> Table:
    """One view of a comparison; ratios are relative to its first row."""
    seeds = max(row["seeds"] for row in panel["rows"])
    title = f"{panel['title'] or 'Comparison'} (median of {seeds})" if seeds > 1 else panel["title"]
    table = Table(box=box.SIMPLE, pad_edge=False, title=escape(title), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in (metric, "ratio", "at most", cost, "share"):
        table.add_column(escape(name), justify="right")
    for row in panel["rows"]:
        diverged = row["results"].get("diverged", 0)
        ratios = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "worst")]
        table.add_row(
            escape(row["label"] + (f", {diverged} diverged" if diverged else "")),
            number(row["value"]),
            *ratios,
            f"{row['cost']:,.0f}",
            "" if row["cost_ratio"] is None else percent(row["cost_ratio"]),
        )
    return table


def number(value: Any) -> str:
    if not isinstance(value, float):
        return "not finite" if value is None else f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
