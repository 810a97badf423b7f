"""Federated rivals beside E3-AiPOD, all tuned on one grid with one budget.

    python benchmarks/rivals.py --methods simfbo,fed-f2sa --out a.json
    python benchmarks/rivals.py --methods fedmbo,fedbioacc --out b.json
    python benchmarks/rivals.py --methods fednest,e2-aipod --out c.json
    python benchmarks/rivals.py --methods e3-aipod --out d.json
    python benchmarks/federated.py --show a.json b.json c.json d.json

Every rival runs in two ways. "own": step sizes are numbers, as in its paper, one of `LOWER` for y
and the adjoint and one of `UPPER` for x, 15 pairs. "ours": E3-AiPOD's curvature-safe steps and
its optimiser of x, with the method's usual number of local steps and with 20. Each of these is run
on the first seed for `--tune` rounds; the one that reaches 90 % in the fewest rounds, or else has
the best accuracy, is then run with all seeds for `--rounds` rounds. E3-AiPOD has its defaults and
no grid. The file holds the runs of the grid as well. `--ways` takes one of the two ways alone;
`--chosen` runs variants that an earlier grid has chosen.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import federated
import jax

from aipod.experiments.config import assignments

LOWER, UPPER = (0.02, 0.1, 0.5), (0.01, 0.1, 0.3, 1.0, 3.0)
OURS = "lower_lr=curvature:adjoint_lr=curvature:upper_optimizer=paced_adam"
# Rounds in an outer step, and the argument that is the number of local steps on y, where there is
# one that costs no round.
METHODS: dict[str, tuple[int, str | None]] = {
    "simfbo": (1, "local_steps"),
    "fed-f2sa": (1, "local_steps"),
    "fedbioacc": (1, "local_steps"),
    "fedmbo": (11, None),
    "fednest": (8, "lower_steps"),
    "e2-aipod": (6, "lower_steps"),
    "e3-aipod": (1, None),
}


def candidates(method: str, ways: list[str]) -> list[list[str]]:
    """The variants of "own", of "ours" or of both; for E3-AiPOD its defaults alone."""
    if method == "e3-aipod":
        return [[method]]
    own = [
        f"{method}:lower_lr={lower}:adjoint_lr={lower}:upper_lr={upper}"
        for lower in LOWER
        for upper in UPPER
    ]
    local = METHODS[method][1]
    ours = [f"{method}:{OURS}", *([] if local is None else [f"{method}:{OURS}:{local}=20"])]
    return [{"own": own, "ours": ours}[way] for way in ways]


def rank(one: dict[str, Any]) -> tuple[float, float]:
    """Smaller is better."""
    reached = one["first"]["0.90"]
    alive = one["result"] != "diverged"
    return (reached["rounds"] if reached and alive else float("inf"), -one["best"] * alive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="hyper-representation", choices=list(federated.TABLES))
    parser.add_argument("--methods", default="simfbo,fed-f2sa", help=", ".join(METHODS))
    parser.add_argument("--ways", nargs="+", default=["own", "ours"], choices=["own", "ours"])
    parser.add_argument("--chosen", nargs="+", help="variants to run as they are, without a grid")
    parser.add_argument("--tune", type=int, default=400, help="rounds of a run of the grid")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds of the chosen runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=["data=mnist"], help="options of the task")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    options = assignments(arguments.set)
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "grid": [],
        "runs": [],
    }

    def made(variant: str, rounds: int, seed: int, where: str) -> dict[str, Any]:
        steps = max(1, rounds // METHODS[variant.split(":")[0]][0])
        one = federated.run(arguments.task, variant, steps, seed, options)
        found[where].append(one)
        arguments.out.write_text(json.dumps(found))
        reached = {k: v["rounds"] for k, v in one["first"].items() if v}
        print(
            f"{where}: {variant} seed {seed}: {one['result']}, last {one['accuracy']:.4f}, best "
            f"{one['best']:.4f}, {one['wall']:.1f} s, rounds {one['rounds']}, {reached}",
            flush=True,
        )
        return one

    groups = [[variant] for variant in arguments.chosen or ()]
    if not groups:
        methods = arguments.methods.split(",")
        groups = [group for method in methods for group in candidates(method, arguments.ways)]
    for group in groups:
        best = group[0]
        if len(group) > 1:
            best = min(group, key=lambda v: rank(made(v, arguments.tune, 0, "grid")))
        for seed in range(arguments.seeds):
            made(best, arguments.rounds, seed, "runs")


if __name__ == "__main__":
    jax.config.update(
        "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "aipod-compiled")
    )
    main()
