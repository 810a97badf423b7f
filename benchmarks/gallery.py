"""The gallery of problems, solved by every solver with its defaults.

    python benchmarks/gallery.py                     # all solvers, all problems, 3 seeds
    python benchmarks/gallery.py --solvers e3-aipod --seeds 1 --only ridge,tolls
    python benchmarks/gallery.py --json benchmarks/results/gallery.json
    python benchmarks/gallery.py --show benchmarks/results/gallery.json  # prints its table
    python benchmarks/gallery.py --docs benchmarks/results/gallery.json  # puts it on the page
    python benchmarks/gallery.py --references        # computes the reference solutions
    python benchmarks/gallery.py --statement         # is what runs say of their convergence right?
    python benchmarks/gallery.py --units             # x and f in other units

A cell is the share of the possible improvement that was reached in the budget,
(F(x0) - F(x)) / (F(x0) - F(reference)), in per cent: the median over seeds, and in brackets the
worst; then the seconds of a run, the median over seeds (the first of them compiles). The budget of
every solver is the samples that E3-AiPOD draws in the problem's number of outer steps. Solvers run
in float32, as a newcomer has them; F is evaluated in float64 with y*(x) solved for.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod._misc.files import write_between_marks, write_text
from aipod.experiments.gallery import PROBLEMS, Exhibit, store
from aipod.experiments.solvers import SOLVERS, entry

DEFAULT = ("aipod", "e-aipod", "e2-aipod", "e3-aipod", "fednest")
FOR_CLIENTS = ("fednest", "lfednest", "fedavg")
ENOUGH = 0.95  # the share that counts as solved
PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"


def make(solver: str) -> aipod.Alternating:
    """The solver with its defaults."""
    return getattr(aipod, entry(solver).function)()


def in_budget(solver: aipod.Alternating, steps: int) -> int:
    """The outer steps that draw as many batches as E3-AiPOD does in so many steps."""

    def batches(one: aipod.Alternating) -> int:
        # One more of the upper level, and one of the lower level for each of curvature and x.
        return one.lower.draws + sum(one.adjoint.draws) + 3

    return max(1, round(steps * batches(aipod.E3AiPOD()) / batches(solver)))


def judged(exhibit: Exhibit, x: Any) -> float:
    """F at x, in float64; infinite where the lower level cannot be solved."""
    point = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), x)
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(point)):
        return math.inf
    try:
        value = exhibit.value(point)
    except RuntimeError:
        return math.inf
    return value if math.isfinite(value) else math.inf


def runs(name: str, solver: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """All seeds of a solver on a problem."""
    row: dict[str, Any] = {"problem": name, "solver": solver}
    exact, exhibit = exhibit_of(name, True), exhibit_of(name, chosen.double)
    with jax.enable_x64(chosen.double):
        made = make(solver)
        steps = chosen.steps or in_budget(made, exhibit.steps)
        try:
            made.init(exhibit.problem, exhibit.x0, exhibit.y0)
        except ValueError as error:
            return row | {"refused": str(error)}
        found = []
        for seed in range(chosen.seeds):
            began = time.perf_counter()
            solution = aipod.solve(
                exhibit.problem,
                made,
                exhibit.x0,
                exhibit.y0,
                steps,
                key=jax.random.key(seed),
                every=steps,
                throw=False,
            )
            jax.block_until_ready(solution.x)
            found.append((solution, time.perf_counter() - began))
    with jax.enable_x64(True):
        shares = [exact.share(judged(exact, solution.x)) for solution, _ in found]
    return row | {
        "steps": steps,
        "shares": [round(share, 6) if math.isfinite(share) else None for share in shares],
        "seconds": [round(seconds, 3) for _, seconds in found],
        "results": [solution.result.name for solution, _ in found],
        "samples": found[-1][0].ledger.samples,
    }


_made: dict[tuple[str, bool], Exhibit] = {}


def exhibit_of(name: str, double: bool) -> Exhibit:
    """The exhibit in this precision; made once, so that its compiled programs are found again."""
    if (name, double) not in _made:
        with jax.enable_x64(double):
            _made[name, double] = PROBLEMS[name]()
    return _made[name, double]


def per_cent(share: float | None) -> str:
    if share is None or share < -9.99:
        return "below -999"
    return f"{100 * share:.1f}"


def worst(row: dict[str, Any]) -> float:
    return min(-math.inf if share is None else share for share in row["shares"])


def middle(row: dict[str, Any]) -> float:
    return statistics.median(-math.inf if share is None else share for share in row["shares"])


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return "refuses"
    text = f"{per_cent(middle(row))} ({per_cent(worst(row))}), "
    text += f"{statistics.median(row['seconds']):.1f} s"
    diverged = sum(result == "diverged" for result in row["results"])
    return text + (f", {diverged} diverged" if diverged else "")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of problems by solvers, with a count at the end."""
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    by_place = {(row["problem"], row["solver"]): row for row in rows}
    lines = ["| | " + " | ".join(SOLVERS[solver].label for solver in solvers) + " |"]
    lines.append("|---|" + "---|" * len(solvers))
    for problem in dict.fromkeys(row["problem"] for row in rows):
        cells = (cell(by_place.get((problem, solver))) for solver in solvers)
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    ran = {s: [r for r in rows if r["solver"] == s and "shares" in r] for s in solvers}
    counts = {
        f"**at least {100 * ENOUGH:.0f} %**": lambda row: middle(row) >= ENOUGH,
        "**worse than the start**, any seed": lambda row: worst(row) < 0,
    }
    for label, counted in counts.items():
        cells = (f"{sum(map(counted, ran[s]))} of {len(ran[s])}" for s in solvers)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def heading(stored: dict[str, Any]) -> str:
    return (
        f"Seeds: {stored['seeds']}; {stored['precision']}, {stored['cores']} CPU cores, jax "
        f"{stored['jax']}, aipod {stored['aipod']}."
    )


def into_page(
    stored: dict[str, Any],
    page: Path = PAGE,
    *,
    name: str = "table",
    shown: Callable[[list[dict[str, Any]]], str] = table,
) -> None:
    """Puts a table into the page between the two marks of this name."""
    write_between_marks(page, name, f"{heading(stored)}\n\n{shown(stored['rows'])}")


def with_heading(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> dict[str, Any]:
    """What is stored beside the rows."""
    return {
        "seeds": chosen.seeds,
        "precision": "float64" if chosen.double else "float32",
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "aipod": aipod.__version__,
        "rows": rows,
    }


def stored_in(path: Path, found: dict[str, Any]) -> None:
    """Writes a row a line."""
    rows = ",\n".join(json.dumps(row) for row in found["rows"])
    rest = {name: value for name, value in found.items() if name != "rows"}
    write_text(path, json.dumps(rest)[:-1] + f', "rows": [\n{rows}\n]}}\n')


def chosen_solvers(
    chosen: argparse.Namespace,
) -> Iterator[tuple[str, str, aipod.Alternating]]:
    """(problem, name, solver) for all that are made for each other."""
    for problem in chosen.only:
        for name in chosen.solvers:
            if name not in FOR_CLIENTS or exhibit_of(problem, True).federated:
                yield problem, name, make(name)


def measure(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for problem, name, _ in chosen_solvers(chosen):
        rows.append(runs(problem, name, chosen))
        said = rows[-1].get("refused") or cell(rows[-1])
        print(f"{problem}, {name}: {said}", file=sys.stderr, flush=True)
    return rows


def compute_references(names: list[str]) -> None:
    from gallery_references import reference

    with jax.enable_x64(True):
        for name in names:
            began = time.perf_counter()
            found, slope = reference(name)
            store({name: found})
            print(
                f"{name}: F falls from {found.start:.6g} to {found.best:.6g}, its gradient to "
                f"{slope:.0e} of that at x0 ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )


def names_of(text: str, known: Any, what: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no {what} {name!r}: choose from {', '.join(known)}.")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solvers", default=",".join(DEFAULT))
    parser.add_argument("--only", default=",".join(PROBLEMS), help="problems, with commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="outer steps, in place of the budget")
    parser.add_argument("--double", action="store_true", help="solvers run in float64")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--show", type=Path, help="print the table of such a file, and do no more")
    parser.add_argument("--docs", type=Path, help="put its table into docs/gallery.md")
    parser.add_argument("--references", action="store_true", help="compute and store references")
    parser.add_argument("--statement", action="store_true", help="compare it with the truth")
    parser.add_argument("--units", action="store_true", help="x and f in other units")
    chosen = parser.parse_args()
    chosen.only = names_of(chosen.only, PROBLEMS, "problem")
    chosen.solvers = names_of(chosen.solvers, SOLVERS, "solver")
    if chosen.references:
        compute_references(chosen.only)
        return
    shown, name = table, "table"
    if checked := chosen.statement or chosen.units:
        import gallery_checks as checks

        chosen.double = True
        shown = checks.statement_table if chosen.statement else checks.units_table
        name = "statement" if chosen.statement else "units"
    if stored_at := chosen.show or chosen.docs:
        stored = json.loads(stored_at.read_text())
        if chosen.docs:
            into_page(stored, name=name, shown=shown)
        else:
            print(shown(stored["rows"]))
        return
    rows = checks.check(chosen, chosen_solvers(chosen)) if checked else measure(chosen)
    found = with_heading(rows, chosen)
    if chosen.json:
        stored_in(chosen.json, found)
    print(heading(found) + "\n\n" + shown(found["rows"]))


if __name__ == "__main__":
    main()
