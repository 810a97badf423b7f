"""Communication on the paper's two federated tasks: rounds, bytes and seconds to an accuracy.

    python benchmarks/federated.py --task hyper-representation --seeds 5 --out results.json
    python benchmarks/federated.py --show results.json

Every seed has its own partition, starting point and samples. The long tables were measured on a
GPU; the results file names the machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod.experiments.config import assignments, resolve
from aipod.experiments.execute import prepare
from aipod.experiments.numbers import markdown, number
from aipod.runs._results import first

LEVELS = (0.80, 0.85, 0.88, 0.90, 0.92, 0.94, 0.96)

# What stands in for a tuned step size in the other methods.
ADAM = "upper_optimizer=fading_adam"
SAFE = "lower_lr=curvature:adjoint_lr=curvature"

# The paper's settings are the experiments' defaults, which leave `adjoint_lr` at Curvature.
TABLES: dict[str, dict[str, dict[str, int]]] = {
    "hyper-representation": {
        "paper": {
            "e-aipod:lower_prob=1": 1000,
            "e-aipod:lower_prob=0.1": 1500,
            "e2-aipod": 1500,
            "fednest": 1500,
            "lfednest": 3000,
            "fedavg": 3000,
        },
        "safe": {
            f"e-aipod:lower_prob=0.1:{SAFE}": 3000,
            f"e2-aipod:{SAFE}": 3000,
            f"e-aipod:lower_prob=0.1:{SAFE}:{ADAM}": 1000,
            f"fednest:{SAFE}:{ADAM}": 1000,
            "e3-aipod": 3000,
            "e3-aipod:compression=bfloat16": 3000,
        },
    },
    "loss-tuning": {
        "paper": {"e-aipod:lower_prob=0.3": 500, "e2-aipod": 500, "fednest": 500},
        "safe": {
            f"e2-aipod:{SAFE}:{ADAM}": 500,
            f"fednest:{SAFE}:{ADAM}": 500,
            "e3-aipod": 3000,
        },
    },
}


def by_arrays(solver: Any) -> Any:
    """A solver whose step sizes are arrays, so that another number finds its compiled program."""

    def one(path: Any, leaf: Any) -> Any:
        name = getattr(path[-1], "name", "") if path else ""
        return jnp.asarray(leaf) if type(leaf) is float and name.endswith("lr") else leaf

    return jax.tree_util.tree_map_with_path(one, solver)


def run(task: str, variant: str, steps: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Makes one run; returns what it took to reach each accuracy."""
    solver, *own = variant.split(":")
    given = {"experiment": task, "solver": solver, "steps": steps, "problem_seed": seed}
    ready = prepare(resolve({**given, **options, **assignments(own)}))
    built = ready.task
    began = time.perf_counter()
    solution = aipod.solve(
        built.problem,
        by_arrays(ready.solver),
        built.x0,
        built.y0,
        steps,
        key=jax.random.key(seed),
        record=built.record,
        every=1,
        throw=False,
    )
    wall = time.perf_counter() - began
    history = solution.history
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "result": solution.result.name,
        "steps": int(solution.state.step),
        "accuracy": float(history["accuracy"][-1]),
        "best": float(history["accuracy"].max()),
        # How far the accuracy ever fell below what it had been, after the first tenth of the run.
        "fall": _fall(history["accuracy"], len(history["accuracy"]) // 10),
        "rounds": int(history["rounds"][-1]),
        "first": first(history, LEVELS, ("rounds", "bytes_up", "step")),
        "seconds": float(solution.seconds[-1]),
        "wall": wall,
        "options": options,
    }


def _fall(accuracy: np.ndarray, since: int) -> float:
    return float(np.max((np.maximum.accumulate(accuracy) - accuracy)[since:]))


def stored(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of results; none in one of another benchmark."""
    found = json.loads(path.read_text()).get("runs", [])
    return [one for one in found if "variant" in one]


def show(runs: list[dict[str, Any]], levels: list[float]) -> None:
    """Prints a table: medians over seeds of rounds and of megabytes sent by one client."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in runs:
        extra = "".join(f", {name} {value}" for name, value in sorted(one["options"].items()))
        groups.setdefault((one["task"] + extra, one["variant"]), []).append(one)
    for task in dict.fromkeys(task for task, _ in groups):
        rows = []
        for (_, variant), members in (g for g in groups.items() if g[0][0] == task):
            cells = [_reached(members, f"{level:.2f}") for level in levels]
            last = statistics.median(one["accuracy"] for one in members)
            diverged = [one["steps"] for one in members if one["result"] == "diverged"]
            pace = _pace(members)
            steps = max(one["steps"] for one in members)
            end = f"{100 * last:.1f} % after {steps:,}"
            if diverged:
                end += f"; {len(diverged)} of {len(members)} diverged"
            rows.append([variant, *cells, end, pace])
        # The columns of the table in README.md.
        head = ["solver", *(f"{100 * level:.0f} %" for level in levels)]
        seeds = max(len(members) for (name, _), members in groups.items() if name == task)
        print(f"\n{task}: rounds (megabytes one client sends), medians of {seeds} seeds\n")
        print(markdown([*head, "last accuracy", "ms a step"], rows), end="")


def _pace(members: list[dict[str, Any]]) -> str:
    """Milliseconds a step; nothing for runs that shared their device with others."""
    known = [one for one in members if one["seconds"] is not None]
    if not known:
        return "-"
    return f"{statistics.median(1e3 * one['seconds'] / max(one['steps'], 1) for one in known):.1f}"


def _reached(members: list[dict[str, Any]], level: str) -> str:
    found = [one["first"][level] for one in members]
    got = [one for one in found if one is not None]
    if 2 * len(got) <= len(found):
        return "-" if not got else f"{len(got)} of {len(found)} seeds"
    endless = {"rounds": float("inf"), "bytes_up": float("inf")}
    median = {
        name: statistics.median_high([(one or endless)[name] for one in found])
        for name in ("rounds", "bytes_up")
    }
    size = median["bytes_up"] / 1e6
    return f"{number(median['rounds'], 0)} ({size:,.{1 if size < 9.95 else 0}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="hyper-representation", choices=list(TABLES))
    parser.add_argument("--table", default="paper", help="paper or safe")
    parser.add_argument("--variants", nargs="*", help="instead of the table's own")
    parser.add_argument("--steps", type=int, help="instead of the table's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=["data=mnist"], help="options of the task")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; stop after")
    parser.add_argument("--out", type=Path, help="results are added to this file")
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of these files")
    parser.add_argument("--levels", type=float, nargs="*", default=[0.80, 0.85, 0.88, 0.90, 0.94])
    arguments = parser.parse_args()
    if arguments.show:
        show(
            [one for path in arguments.show for one in stored(path)],
            arguments.levels,
        )
        return
    began = time.perf_counter()
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "runs": [],
    }
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    table = TABLES[arguments.task].get(arguments.table, {})
    variants = arguments.variants or list(table)
    for variant in variants:
        for seed in range(arguments.seeds):
            if time.perf_counter() - began > arguments.budget:
                print("the time is over")
                return
            steps = arguments.steps or table.get(variant, 300)
            one = run(arguments.task, variant, steps, seed, assignments(arguments.set))
            found["runs"].append(one)
            reached = {k: v["rounds"] for k, v in one["first"].items() if v}
            print(
                f"{variant} seed {seed}: {one['result']} at {one['steps']}, last "
                f"{one['accuracy']:.4f}, best {one['best']:.4f}, fall {one['fall']:.4f}, "
                f"{one['seconds']:.1f} s ({one['wall']:.1f} with compiling), rounds "
                f"{one['rounds']}, {reached}",
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    jax.config.update(
        "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "aipod-compiled")
    )
    main()
