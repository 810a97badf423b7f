"""What one exchange of a federation on Flower takes, with and without a process that stays.

    python benchmarks/exchange_time.py --steps 12 --nodes 3 --out exchange_time.json

It starts a federation on this machine twice, runs the app of `aipod federation new` on it (whose
outer step is one exchange, with next to nothing to compute), and prints the seconds between two
exchanges: of the first ones, in which programs are compiled, and the median of the rest.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aipod.flower._federation import Federation
from aipod.flower._new import write_app


def seconds(folder: Path, *, warm: bool, tls: bool, nodes: int, steps: int) -> dict[str, Any]:
    """One run; when its exchanges were answered."""
    app, run = folder / "my-app", folder / "run"
    write_app(app)
    project = app / "pyproject.toml"
    text = project.read_text().replace("outer-steps = 12", f"outer-steps = {steps}")
    project.write_text(text)
    federation = Federation(folder / "federation", warm=warm)
    began = time.monotonic()
    try:
        federation.up(nodes, tls=tls)
        ready = time.monotonic()
        federation.run(app, run)
        ended = time.monotonic()
    finally:
        federation.down()
    with open(run / "metrics.csv", newline="") as file:
        clock = [float(row["seconds"]) for row in csv.DictReader(file)]
    gaps = [b - a for a, b in itertools.pairwise(clock)]
    return {
        "warm": warm,
        "up": ready - began,
        "to the first step": clock[0],
        "first exchanges": gaps[:2],
        "exchange": statistics.median(gaps[2:]),
        "slowest": max(gaps[2:]),
        "run": ended - ready,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", choices=["warm", "cold"])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    found = []
    for kind in ("cold", "warm") if arguments.only is None else (arguments.only,):
        with tempfile.TemporaryDirectory() as folder:
            how = {name: getattr(arguments, name) for name in ("tls", "nodes", "steps")}
            found.append(seconds(Path(folder), warm=kind == "warm", **how))
        print(json.dumps(found[-1]), flush=True)
    if arguments.out:
        about = {"flwr": version("flwr"), "cores": os.cpu_count(), **vars(arguments)}
        Path(arguments.out).write_text(json.dumps({"about": about, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
