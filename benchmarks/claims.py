"""Measures again what README.md and the documents claim, and prints claimed beside measured.

    make claims                  # the short ones, some minutes
    make claims LONG=--long      # the studies too, about a quarter of an hour more

The speeds are CPU time on one core; on a machine with other work they still vary.

Each claim has a margin, wide enough for another machine and another version of JAX. The exit code
is 1 if a measured value is outside. What needs MNIST and a GPU is not measured here: its table is
compared with the stored results.
"""

import argparse
import dataclasses
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclasses.dataclass(frozen=True)
class Found:
    """One number: where it is claimed, and what was measured."""

    where: str
    what: str
    claimed: float
    measured: float
    margin: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.claimed) <= self.margin


def command(folder: Path, *words: str) -> dict[str, Any]:
    """The JSON that a line of the command prints."""
    line = [sys.executable, "-m", "aipod", *words, "--out", str(folder), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    if not done.stdout:
        raise SystemExit(f"aipod {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def figure1(folder: Path) -> Iterator[Found]:
    rows = {
        row["label"]: row
        for panel in command(folder, "compare", "synthetic")["tables"]
        for row in panel["rows"]
    }
    tenth, two = rows["E-AiPOD (p = 0.1, T = 1)"], rows["E-AiPOD (p = 0.3, T = 2)"]
    page = "docs/guides/reproduce.md"
    yield Found(page, "p = 0.1: error, relative to p = 1", 1.04, tenth["ratio"], 0.06)
    yield Found(page, "p = 0.1: share of the projections", 0.1, tenth["cost_ratio"], 0.01)
    yield Found(page, "T = 2: error, relative to AiPOD", 1.43, two["ratio"], 0.15)


def application(name: str, *claims: tuple[str, float, float]) -> Callable[[Path], Iterator[Found]]:
    def measure(folder: Path) -> Iterator[Found]:
        last = command(folder, "run", name)["last"]
        for what, claimed, margin in claims:
            yield Found(f"docs/applications/{name}.md", what, claimed, last[what], margin)

    return measure


def speed(folder: Path) -> Iterator[Found]:
    line = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--quick"]
    text = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    (ratio,) = re.findall(r"aipod.solve is ([\d.]+) times as fast", text)
    yield Found("README.md", "solve against a NumPy loop, n = 100", 6.5, float(ratio), 2.8)


def communication(folder: Path) -> Iterator[Found]:
    """The table of README.md against the stored results; every row must be there."""
    from benchmarks.federated import show, stored

    results = ROOT / "benchmarks/results"
    files = (results / "hyper_representation.json", results / "rivals.json")
    out = io.StringIO()
    with redirect_stdout(out):
        show([one for file in files for one in stored(file)], [0.80, 0.85, 0.88, 0.90, 0.94])
    made = {tuple(row[1:]) for row in cells(out.getvalue())}
    text = (ROOT / "README.md").read_text().replace("**", "")
    part = text.partition("## Communication")[2].partition("\n## ")[0]
    rows = [row[1:] for row in cells(part) if any(row[1:]) and row[0] != "solver"]
    same = sum(tuple(row) in made for row in rows)
    yield Found("README.md", "rows of the table that --show prints", len(rows), same, 0)


def study(verb: list[str], page: str, keys: int) -> Callable[[Path], Iterator[Found]]:
    """The exponents of a page's table against those of a new measurement."""

    def exponents(text: str) -> dict[tuple[str, ...], float]:
        found, column = {}, None
        for row in cells(text):
            if "measured" in row:
                column = row.index("measured")
            elif column is not None and column < len(row) and is_number(row[column]):
                found[tuple(row[:keys])] = float(row[column])
        return found

    def measure(folder: Path) -> Iterator[Found]:
        command(folder, *verb)
        new = exponents((folder / "table.md").read_text())
        for key, claimed in exponents((ROOT / page).read_text()).items():
            if key in new:
                yield Found(page, ", ".join(key), claimed, new[key], 0.15)

    return measure


def cells(text: str) -> list[list[str]]:
    """The cells of all Markdown tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "|---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


SHORT: dict[str, Callable[[Path], Iterator[Found]]] = {
    "communication": communication,
    "figure 1": figure1,
    "portfolio": application(
        "portfolio", ("volatility", 20.8, 0.15), ("test_volatility", 14.8, 0.3)
    ),
    "transport": application("transport", ("fit_error", 0.19, 0.06), ("cost_error", 0.70, 0.06)),
    "cleaning": application("cleaning", ("auc", 0.97, 0.01), ("accuracy", 0.935, 0.015)),
    "tolls": application("tolls", ("saved", 4.5, 0.2), ("trips", 98.7, 0.2)),
    "speed": speed,
}
LONG: dict[str, Callable[[Path], Iterator[Found]]] = {
    "table 1 (3 to 7 minutes)": study(["compare", "table1"], "docs/table1.md", 2),
    "rates (about 6 minutes)": study(["rates"], "docs/rates.md", 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join([*SHORT, *LONG])}")
    parser.add_argument("--long", action="store_true", help="the long ones too")
    arguments = parser.parse_args()
    known = SHORT | LONG
    chosen = {
        name: measure
        for name, measure in known.items()
        if any(name.startswith(word) for word in arguments.names)
        or (not arguments.names and (name in SHORT or arguments.long))
    }
    print(f"{'claim':50} {'claimed':>9} {'measured':>9} {'margin':>7}")
    wrong, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for number, (name, measure) in enumerate(chosen.items()):
            for one in measure(Path(place) / str(number)):
                mark = "" if one.holds else "  OUTSIDE"
                print(
                    f"{name.partition(' (')[0] + ': ' + one.what:50.50} {one.claimed:9.4g} "
                    f"{one.measured:9.4g} {one.margin:7.3g}{mark}",
                    flush=True,
                )
                wrong += not one.holds
    for name in known:
        if name not in chosen and not arguments.names:
            print(f"{name:50} skipped; --long measures it")
    print(f"{wrong} outside their margins, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
