"""`aipod list`."""

import json

from rich import box
from rich.table import Table

from aipod.cli._show import out
from aipod.experiments import SUMMARIES
from aipod.experiments.solvers import SOLVERS


def show(as_json: bool) -> None:
    if as_json:
        solvers = {name: entry.summary for name, entry in SOLVERS.items()}
        print(json.dumps({"experiments": SUMMARIES, "solvers": solvers}))
        return
    rows = {
        "experiment": SUMMARIES,
        "solver": {name: entry.summary for name, entry in SOLVERS.items()},
    }
    for kind, entries in rows.items():
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column(kind, no_wrap=True)
        table.add_column("")
        for name, summary in entries.items():
            table.add_row(name, summary)
        out.print(table)
    out.print("Try: aipod run synthetic --solver e-aipod, then aipod report runs")
    out.print("A task of your own: aipod new mine, then aipod run mine.py:task")
