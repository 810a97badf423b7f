"""`aipod report`."""

import json
from pathlib import Path

from rich.markup import escape

from aipod._report import claims
from aipod._report.collect import collect
from aipod._report.page import write_report
from aipod._report.studies import studies
from aipod.cli._show import out as console


def report(folders: list[Path], out: Path | None, *, force: bool, as_json: bool) -> None:
    sections, found = collect(folders), studies(folders)
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    path = out or default
    write_report(sections, path, found, force=force)
    if as_json:
        sentences = [sentence for section in sections for sentence in claims.sentences(section)]
        print(json.dumps({"report": str(path), "sentences": sentences}))
        return
    console.print(f"The report is in {escape(str(path))}; open it in a browser.")
