"""The cost of `Curvature`: seconds per outer step with it and with fixed step sizes.

    python benchmarks/curvature_cost.py
    python benchmarks/curvature_cost.py --set data=mnist --steps 200

Both run alternately, several times, in one process; the medians and their ratio are printed. The
fixed step sizes are small enough that no run diverges. Compile time is not counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import aipod
from aipod.experiments.config import assignments, resolve
from aipod.experiments.execute import prepare
from aipod.experiments.solvers import defaults

FIXED = {"lower_lr": 1e-3, "adjoint_lr": 1e-3}


def contestant(
    task: str, solver: str, rates: dict[str, Any], options: dict[str, Any], steps: int
) -> Callable[[], float]:
    """Returns a function that measures the seconds per outer step after the first one."""
    given = {"experiment": task, "solver": solver, "steps": steps + 1, **rates, **options}
    ready, key = prepare(resolve(given)), jax.random.key(0)

    def seconds(count: int) -> float:
        start = (ready.task.x0, ready.task.y0)
        began = time.perf_counter()
        aipod.solve(ready.task.problem, ready.solver, *start, count, key=key, every=count)
        return time.perf_counter() - began

    seconds(1)
    # Subtract the first step, whose power iteration starts cold.
    return lambda: (seconds(1 + steps) - seconds(1)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=["data=digits"], help="options of the task")
    parser.add_argument(
        "--solvers", nargs="*", default=["e-aipod", "e2-aipod", "e3-aipod", "fednest"]
    )
    parser.add_argument("--tasks", nargs="*", default=["hyper-representation", "loss-tuning"])
    chosen = parser.parse_args()
    options = assignments(chosen.set)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {' '.join(chosen.set)}")
    for task in chosen.tasks:
        for solver in chosen.solvers:
            own = {name: defaults(solver)[name] for name in FIXED}
            fixed, found = (
                contestant(task, solver, rates, options, chosen.steps) for rates in (FIXED, own)
            )
            times = [(fixed(), found()) for _ in range(chosen.rounds)]
            without, with_them = (statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"{task}, {solver}: {1e3 * without:.2f} ms a step with fixed steps, "
                f"{1e3 * with_them:.2f} ms with Curvature, {1 - without / with_them:.0%} of it",
                flush=True,
            )


if __name__ == "__main__":
    main()
