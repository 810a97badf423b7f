"""Two more looks at the gallery: other units, and whether the word at the end is right.

`python benchmarks/gallery.py --statement` and `--units` come here.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

import aipod
from aipod.experiments.gallery import PROBLEMS, Exhibit, in_units

# A run is wrong where it says yes above the first share of |grad F|^2 at its largest, which is ten
# times what it promises, or no below the second.
YES, NO = 1e-3, 1e-5
# Units of x and factors of f; not powers of two, which would only shift bits.
UNITS = ((1.0, 1.0), (1e-3, 1.0), (1e3, 1.0), (1.0, 1e-3), (1.0, 1e3), (1e-3, 1e3), (1e3, 1e-3))
# Problems with starts at 0 and elsewhere, with and without noise, constraints and clients.
IN_UNITS = ("ridge", "logistic", "pricing", "dispatch", "federated-trust")


def _solved(exhibit: Exhibit, solver: aipod.Alternating, steps: int, seed: int) -> aipod.Solution:
    key = jax.random.key(seed)
    return aipod.solve(
        exhibit.problem, solver, exhibit.x0, exhibit.y0, steps, key=key, every=steps, throw=False
    )


def statement(name: str, solver: aipod.Alternating, *, steps: int, seed: int) -> dict[str, Any]:
    """What a run says of its convergence, beside the exact stationarity."""
    exhibit = PROBLEMS[name]()
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
    return {"problem": name, "converged": says, "share": share, "right": right}


def units(name: str, solver: aipod.Alternating, *, steps: int, seed: int) -> dict[str, Any]:
    """The share of the improvement for every unit of x and factor of f."""
    exhibit, shares = PROBLEMS[name](), {}
    for unit, scale in UNITS:
        other = in_units(exhibit, jnp.asarray(unit), scale)
        solution = _solved(other, solver, steps, seed)
        back = jax.tree.map(lambda leaf, unit=unit: leaf / unit, solution.x)
        try:
            shares[f"x {unit:g}, f {scale:g}"] = exhibit.share(exhibit.value(back))
        except RuntimeError:
            shares[f"x {unit:g}, f {scale:g}"] = -math.inf
    return {"problem": name, "shares": shares}
