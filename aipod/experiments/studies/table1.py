"""Measures the paper's Table 1: what each method accepts, and its costs.

Every method runs for several K with the step sizes, numbers of steps and batches of its own paper,
on the synthetic problem with none, some or all of its constraints. The error is the average of
||grad F(x^k)||^2 over the run, as in the theorems.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import aipod
from aipod.algorithms import Alternating
from aipod.experiments import numbers
from aipod.experiments.studies.exponents import cost_at, fit
from aipod.experiments.studies.horizon import GRID, Curve, Setting, Told, horizons, sweep
from aipod.experiments.studies.rate_settings import arrays
from aipod.experiments.tasks import synthetic
from aipod.stepsize import rule, theory

ACCURACIES = (0.3, 0.1, 0.03)
# Which levels are constrained, and whether the constraint on y depends on x.
PROBLEMS = {
    "none": {"constraints": "none", "coupled": False},
    "upper": {"constraints": "upper", "coupled": False},
    "lower": {"constraints": "lower", "coupled": False},
    "both": {"constraints": "both", "coupled": False},
    "coupled": {"constraints": "both", "coupled": True},
}


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A method: a solver for each K, its K as shares of the largest, its claimed exponent."""

    name: str
    label: str
    make: Callable[[int], Alternating]
    claimed: float | None
    grid: tuple[float, ...] = GRID
    noise: bool = True


# grad_yy g = I: one Neumann term with step 1 is exact.
_EXACT = {"adjoint_lr": 1.0, "adjoint_steps": 1}


def _ruled(method: Callable[..., Alternating], name: str, **constants: float) -> Any:
    def make(steps: int) -> Alternating:
        chosen = rule(name, steps, **constants)
        if "adjoint_steps" in chosen:
            chosen |= _EXACT
        if name == "alset":
            chosen["lower_steps"] = 1  # ALSET is AiPOD without constraints
        return method(**arrays(chosen))

    return make


def _aipod(steps: int) -> Alternating:
    chosen = theory(steps, "thm", upper=1.0, ratio=4.0)
    return aipod.AiPOD(**arrays(chosen | _EXACT), lower_steps=1)


def _e_aipod(steps: int) -> Alternating:
    chosen = theory(steps, "redu-LL", upper=1.0, ratio=4.0)
    return aipod.EAiPOD(**arrays(chosen | _EXACT), lower_steps=1)


def _e2_aipod(steps: int) -> Alternating:
    # Constant rho and q; with the corollary's choices the adjoint is not solved (docs/rates.md).
    chosen = theory(steps, "cor-E2", upper=1.0, ratio=4.0)
    chosen |= {"adjoint_lr": 0.5, "adjoint_prob": 0.5}
    return aipod.E2AiPOD(**arrays(chosen), lower_steps=1)


# For methods whose batches or accuracy grow with K, and which need fewer outer steps.
_FEW = (0.0001, 0.0003, 0.001, 0.003, 0.007)
ENTRANTS = (
    Entrant("aipod", "AiPOD", _aipod, 2.0),
    Entrant("e-aipod", "E-AiPOD", _e_aipod, 2.0),
    # Each K has its own T and N and so its own program: fewer K, to compile less.
    Entrant("e2-aipod", "E2-AiPOD", _e2_aipod, 2.0, (0.003, 0.03, 0.3, 1.0)),
    Entrant("bsa", "BSA", _ruled(aipod.BSA, "bsa"), 3.0, GRID[:-1]),
    Entrant(
        "stocbio", "stocBiO", _ruled(aipod.StocBiO, "stocbio", upper=0.1, lower=0.5), 2.0, _FEW
    ),
    Entrant("alset", "ALSET", _ruled(aipod.ALSET, "alset", lower=4.0), 2.0),
    Entrant("ttsa", "TTSA", _ruled(aipod.TTSA, "ttsa"), 2.5),
    Entrant("ig-al", "IG-AL", _ruled(aipod.IGAL, "ig-al", upper=0.1), None, _FEW, noise=False),
    Entrant("soba", "SOBA", _ruled(aipod.SOBA, "soba", lower=4.0, adjoint=4.0), 2.0),
    Entrant(
        "first-order-penalty",
        "First-order penalty",
        _ruled(aipod.FirstOrderPenalty, "first-order-penalty", upper=0.1),
        None,
        _FEW,
        noise=False,
    ),
)


NAMES = tuple(entrant.name for entrant in ENTRANTS)


def setting(problem: str, noise: bool) -> Setting:
    options = synthetic.Options(
        dimension=20,
        lower_rank=5,
        upper_rank=5,
        noise=0.1 if noise else 0.0,
        **PROBLEMS[problem],  # type: ignore[arg-type]
    )
    task = synthetic.build(options)

    def error(x: Array, y: Array) -> Array:
        return task.record(task.problem.upper_set.project(x), y)["stationarity"]

    return Setting(task.problem, task.x0, task.y0, error)


def refusal(entrant: Entrant, case: Setting) -> str | None:
    """Returns the error message of a method that does not accept a problem, else None."""
    try:
        entrant.make(100).init(case.problem, case.x0, case.y0)
    except ValueError as error:
        return str(error)
    return None


# As the paper counts: upper projections are those of x and those inside the adjoint.
COSTS = ("samples", "upper projections", "lower projections")


def costs(case: Setting, curve: Curve) -> dict[str, np.ndarray]:
    """The costs for each K. A level without constraints has no projections."""
    counts = curve.counts
    on_x, on_y = case.problem.upper_set.constrained, case.problem.lower_set.constrained
    upper = counts["upper_projections"] * on_x + counts["adjoint_projections"] * on_y
    return dict(zip(COSTS, (curve.samples, upper, counts["lower_projections"] * on_y), strict=True))


def measure(
    steps: int,
    seeds: int,
    seed: int = 0,
    *,
    chosen: Sequence[str] = NAMES,
    told: Told = lambda words: None,
) -> dict[str, Any]:
    """Runs the measurements; returns which problems are accepted, and the costs, as plain data.

    **Arguments:**

    - `steps`: the largest K.
    - `seeds`, `seed`: how many runs for each K, and the seed of all of them.
    - `chosen`: some of `NAMES`.
    - `told`: receives a message after each curve.

    !!! example
        ```python
        summary = table1.measure(10_000, 2, chosen=["aipod", "ttsa"], told=print)
        ```
    """
    cases = {(p, noise): setting(p, noise) for p in PROBLEMS for noise in (True, False)}
    methods, found = [], []
    for entrant in (entrant for entrant in ENTRANTS if entrant.name in chosen):
        refused = {p: refusal(entrant, cases[p, entrant.noise]) for p in PROBLEMS}
        noisy = refusal(entrant, cases["none", True])
        methods.append(
            {"name": entrant.name, "label": entrant.label, "noise": noisy, "refused": refused}
        )
        ks = horizons(steps, entrant.grid)
        for problem in (p for p, words in refused.items() if words is None):
            case = cases[problem, entrant.noise]
            runs = seeds if entrant.noise else 1
            curve = sweep(entrant.make, case, ks, seeds=runs, key=jax.random.key(seed))
            found.append(_row(entrant, problem, curve, costs(case, curve)))
            told(f"{entrant.label}, {problem}: {curve.words()}")
    return {
        "kind": "table1",
        "steps": steps,
        "seeds": seeds,
        "accuracies": list(ACCURACIES),
        "methods": methods,
        "rows": found,
    }


def _row(
    entrant: Entrant, problem: str, curve: Curve, spent: dict[str, np.ndarray]
) -> dict[str, Any]:
    def reach(cost: np.ndarray) -> list[float | None]:
        # A cost of zero has no logarithm to interpolate.
        return [cost_at(a, curve.error, cost) if cost[-1] > 0 else 0.0 for a in ACCURACIES]

    return {
        "name": entrant.name,
        "method": entrant.label,
        "problem": problem,
        "noise": entrant.noise,
        **{name: reach(cost) for name, cost in spent.items()},
        "claimed": entrant.claimed,
        "exponent": dataclasses.asdict(fit(curve.samples, 1 / curve.error)),
        "curve": curve.plain(),
    }


def markdown(summary: dict[str, Any]) -> str:
    """Returns two tables in Markdown: accepted problems, and costs of the accuracies."""
    problems = list(PROBLEMS)
    marks = []
    for method in summary["methods"]:
        words = [method["noise"], *(method["refused"][p] for p in problems)]
        marks.append([method["label"], *("yes" if word is None else "refused" for word in words)])
    columns = [f"{what} to {a:g}" for what in COSTS for a in summary["accuracies"]]
    rows = []
    for row in summary["rows"]:
        cells = [row["method"], row["problem"] + ("" if row["noise"] else ", no noise")]
        cells += [numbers.rounded(cost) for name in COSTS for cost in row[name]]
        rows.append([*cells, *exponents(row)])
    head = ["method", "problem", *columns, "claimed", "measured", "95 % interval"]
    return (
        numbers.markdown(["method", "noise", *problems], marks)
        + "\n"
        + numbers.markdown(head, rows)
    )


def exponents(row: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the claimed and measured exponent and its interval as text."""
    found = row["exponent"]
    return (
        "" if row["claimed"] is None else numbers.setting(row["claimed"]),
        numbers.ratio(found["value"]),
        numbers.interval(found["low"], found["high"]),
    )
