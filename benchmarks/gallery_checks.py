"""Two more looks at the gallery: other units, and whether the word at the end is right.

`python benchmarks/gallery.py --statement` and `--units` come here, with `--json`, `--show` and
`--docs` as for the table of shares. Solvers run in float64.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

import aipod
from aipod.experiments.gallery import PROBLEMS, Exhibit, in_units
from aipod.experiments.solvers import SOLVERS

# A run is wrong where it says yes above the first share of |grad F|^2 at its largest, which is ten
# times what it promises, or no below the second.
YES, NO = 1e-3, 1e-5
# Units of x and factors of f; not powers of two, which would only shift bits.
UNITS = ((1.0, 1.0), (1e-3, 1.0), (1e3, 1.0), (1.0, 1e-3), (1.0, 1e3), (1e-3, 1e3), (1e3, 1e-3))
# Problems with starts at 0 and elsewhere, with and without noise, constraints and clients.
IN_UNITS = (
    "ridge",
    "logistic",
    "elastic",
    "kernel",
    "poisoning",
    "control",
    "pricing",
    "dispatch",
    "federated-trust",
)
# The share from which on a run counts as solved, in whatever units.
SOLVED = 0.99


def _solved(exhibit: Exhibit, solver: aipod.Alternating, steps: int, seed: int) -> aipod.Solution:
    key = jax.random.key(seed)
    return aipod.solve(
        exhibit.problem, solver, exhibit.x0, exhibit.y0, steps, key=key, every=steps, throw=False
    )


def statement(
    exhibit: Exhibit, solver: aipod.Alternating, *, steps: int, seed: int
) -> dict[str, Any]:
    """What a run says of its convergence, beside the exact stationarity."""
    solution = _solved(exhibit, solver, steps, seed)
    said = solution.convergence
    first = float(aipod.stationarity(exhibit.problem, exhibit.x0, exhibit.y0))
    try:
        point = exhibit.problem.upper_set.project(solution.x)
        last = float(aipod.stationarity(exhibit.problem, point, exhibit.y0))
    except RuntimeError:
        last = math.inf
    share = last / max(first, (said.start or 0.0) if said else 0.0)
    says = solution.converged
    right = share <= YES if says else share >= NO if says is False else True
    return {"converged": says, "share": share, "right": right}


def units(exhibit: Exhibit, solver: aipod.Alternating, *, steps: int, seed: int) -> dict[str, Any]:
    """The share of the improvement for every unit of x and factor of f."""
    shares = {}
    for unit, scale in UNITS:
        other = in_units(exhibit, jnp.asarray(unit), scale)
        solution = _solved(other, solver, steps, seed)
        back = jax.tree.map(lambda leaf, unit=unit: leaf / unit, solution.x)
        try:
            shares[f"x {unit:g}, f {scale:g}"] = exhibit.share(exhibit.value(back))
        except RuntimeError:
            shares[f"x {unit:g}, f {scale:g}"] = -math.inf
    return {"shares": shares}


def check(
    chosen: argparse.Namespace, solvers: Iterable[tuple[str, str, aipod.Alternating]]
) -> list[dict[str, Any]]:
    """All runs of `--statement` or `--units`, for (problem, name, solver); prints a line each."""
    looked, rows = statement if chosen.statement else units, []
    exhibit, last = None, ""
    with jax.enable_x64(True):
        for problem, name, solver in solvers:
            if chosen.units and problem not in IN_UNITS:
                continue
            if exhibit is None or problem != last:
                # A system allows a process only so many programs.
                jax.clear_caches()
                exhibit, last = PROBLEMS[problem](), problem
            try:
                solver.init(exhibit.problem, exhibit.x0, exhibit.y0)
            except ValueError:
                continue
            for seed in range(chosen.seeds):
                found = looked(exhibit, solver, steps=chosen.steps or exhibit.steps, seed=seed)
                rows.append({"problem": problem, "solver": name, "seed": seed} | found)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def units_table(rows: list[dict[str, Any]]) -> str:
    """The worst and the best share over units and seeds."""

    def cell(found: list[dict[str, Any]]) -> str:
        shares = [share for row in found for share in row["shares"].values()]
        text = f"{100 * min(shares):.2f} to {100 * max(shares):.2f}"
        return text if min(shares) >= SOLVED else f"**{text}**"

    return _table(rows, cell)


def statement_table(rows: list[dict[str, Any]]) -> str:
    """How many runs say that they have converged, that they have not, and that they cannot tell."""

    def cell(found: list[dict[str, Any]]) -> str:
        said = [row["converged"] for row in found]
        text = f"{said.count(True)} / {said.count(False)} / {said.count(None)}"
        wrong = sum(not row["right"] for row in found)
        return f"**{text}, {wrong} wrong**" if wrong else text

    wrong = sum(not row["right"] for row in rows)
    return f"{_table(rows, cell)}\n\nWrong: {wrong} of {len(rows)} runs."


def _table(rows: list[dict[str, Any]], cell: Callable[[list[dict[str, Any]]], str]) -> str:
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    lines = ["| | " + " | ".join(SOLVERS[solver].label for solver in solvers) + " |"]
    lines.append("|---|" + "---|" * len(solvers))
    for problem in dict.fromkeys(row["problem"] for row in rows):
        cells = []
        for solver in solvers:
            found = [r for r in rows if r["problem"] == problem and r["solver"] == solver]
            cells.append(cell(found) if found else "")
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
