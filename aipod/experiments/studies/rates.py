"""Measures the paper's complexity claims: the exponents of samples and projections.

Every theorem gives step sizes for a run of K outer steps and bounds the average over that run of
E ||grad F(x^k)||^2 by O(1 / sqrt(K)). This module makes such runs for several K. Log-log fits of
their costs against that average give the exponents of the paper's Table 1.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aipod.experiments import numbers
from aipod.experiments.studies.exponents import Exponent, cost_at, fit
from aipod.experiments.studies.horizon import Curve, Setting, Told, horizons, joined, sweep
from aipod.experiments.studies.rate_settings import Method, logistic, methods, noisy, several_steps

_MANY = (1, 2, 4, 8, 16)
# If the last error of a curve exceeds its smallest one by this factor, the error does not fall.
_STALLED = 1.05


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: the claimed and the measured exponent of a cost.

    `counted` is the exponent if the error were exactly K^(-1/2), or the power of K that is claimed
    for the method; it includes the logarithms that the claims leave out. `measured` is None if the
    error does not fall.
    """

    problem: str
    method: str
    cost: str
    claimed: float
    counted: float | None
    measured: Exponent | None
    note: str = ""


def _costs(curve: Curve) -> dict[str, np.ndarray]:
    counts = curve.counts
    upper = counts["upper_projections"]
    return {
        "samples": curve.samples,
        "lower projections": counts["lower_projections"],
        "upper, x alone": upper,
        "upper, x and adjoint": upper + counts["adjoint_projections"],
    }


def rows(problem: str, method: Method, curve: Curve) -> list[Row]:
    """Returns the lines of one curve."""
    samples, lower, upper = method.claimed
    claims = (samples, lower, upper, upper)
    least = int(np.argmin(curve.error))
    note, falls = "", curve.error[-1] <= _STALLED * curve.error[least]
    if not falls:
        note = (
            f"the error does not fall: {curve.error[least]:.2g} at K = {curve.steps[least]:,}, "
            f"{curve.error[-1]:.2g} at K = {curve.steps[-1]:,}"
        )
    return [
        Row(
            problem,
            method.label,
            name,
            claimed,
            fit(cost, curve.steps).value / method.falls,
            fit(cost, 1 / curve.error) if falls else None,
            note,
        )
        for claimed, (name, cost) in zip(claims, _costs(curve).items(), strict=True)
    ]


def projections_against_steps(label: str, curves: dict[int, Curve]) -> list[Row]:
    """Fits the costs of reaching a fixed error as powers of T, from one curve for each T."""
    error = max(float(curve.error.min()) for curve in curves.values())
    found = []
    for name, claimed in (
        ("samples", 0.0),
        ("lower projections", -0.75),
        ("upper, x and adjoint", -1.0),
    ):
        costs = [cost_at(error, c.error, _costs(c)[name]) for c in curves.values()]
        measured = fit([cost for cost in costs if cost is not None], list(curves))
        words = f"to reach {error:.2g}"
        found.append(Row("synthetic", label, f"{name}, power of T", claimed, None, measured, words))
    return found


PROBLEMS = ("synthetic", "logistic")
METHODS = {
    "aipod": "AiPOD, Theorem `thm`",
    "e-aipod": "E-AiPOD, Corollary `redu-LL`",
    "e2-constant": "E2-AiPOD, Theorem `thm:conv-E2` with rho constant",
    "e2-warm": "E2-AiPOD whose adjoint goes on from the outer step before",
    "e2-printed": "E2-AiPOD, Corollary `cor-E2` as printed",
    "e2-proof": "E2-AiPOD, Corollary `cor-E2` with the N that its proof needs",
    "e3": "E3-AiPOD, ours: one projection round for each outer step, 4 and 2 local steps",
    "e3-growing": "E3-AiPOD with K^(1/3) local steps and upper batches of that size",
    "several-steps": "E-AiPOD with T = 1 to 16 steps on x, Corollary `redu-UL`",
}


def _setting(problem: str) -> tuple[Setting, tuple[Method, ...]]:
    if problem == "synthetic":
        # grad_yy g = I: one Neumann term with step 1 is exact.
        return noisy(), methods({"upper": 1.0, "ratio": 4.0}, 1.0, exact=True)
    return logistic(), methods({"upper": 2.0, "ratio": 2.0, "longest": 0.4}, 0.4, exact=False)


def measure(
    steps: int,
    seeds: int,
    seed: int = 0,
    *,
    problems: Sequence[str] = PROBLEMS,
    chosen: Sequence[str] = tuple(METHODS),
    told: Told = lambda words: None,
) -> dict[str, Any]:
    """Runs the measurements; returns curves and rows as plain data.

    **Arguments:**

    - `steps`: the largest K; the smallest is three thousandths of it.
    - `seeds`, `seed`: how many runs for each K, and the seed of all of them.
    - `problems`, `chosen`: some of `PROBLEMS` and `METHODS`.
    - `told`: receives a message after each curve.

    !!! example
        ```python
        summary = rates.measure(10_000, 4, chosen=["aipod", "e-aipod"], told=print)
        ```
    """
    grid = horizons(steps)
    key = jax.random.key(seed)
    table: list[Row] = []
    curves: dict[str, dict[str, Any]] = {}

    def run(title: str, label: str, make: Any, setting: Setting, ks: Sequence[int]) -> Curve:
        curve = sweep(make, setting, ks, seeds=seeds, key=key)
        if not np.all(np.isfinite(curve.error)):
            raise ValueError(
                f"{label} on {title} diverges for the smallest K ({ks[0]:,}), whose steps are the "
                "longest: choose more --steps."
            )
        told(f"{title}, {label}: {curve.words()}")
        curves.setdefault(title, {})[label] = curve.plain()
        return curve

    for title in problems:
        setting, offered = _setting(title)
        for method in (method for method in offered if method.name in chosen):
            if title == "logistic" and method.longest is not None:
                continue
            if method.batches is not None:
                sizes = {
                    k: method.batches(k) for k in horizons(min(steps, method.longest or steps))
                }
                parts = [
                    run(title, method.label, method.make, noisy(upper_batch=size), [k])
                    for k, size in sizes.items()
                ]
                curve = joined(parts)
                curves[title][method.label] = curve.plain()
                table += rows(title, method, curve)
                continue
            ks = grid if title == "synthetic" else grid[:-1]
            if method.longest is not None:  # as many decades, at smaller K
                ks = horizons(min(steps, method.longest))
            table += rows(title, method, run(title, method.label, method.make, setting, ks))
    if "several-steps" in chosen:
        for label, averaged in (
            ("E-AiPOD, lower batch T", False),
            ("E-AiPOD, lower batch T, w averaged", True),
        ):
            by_count = {}
            for count in _MANY:
                setting = noisy(count, averaged=averaged)
                make = functools.partial(several_steps, count=count)
                by_count[count] = run(label, f"T = {count}", make, setting, grid[1:-1])
            table += projections_against_steps(label, by_count)
    return {
        "kind": "rates",
        "seeds": seeds,
        "steps": steps,
        "rows": [dataclasses.asdict(row) for row in table],
        "curves": curves,
    }


def markdown(summary: dict[str, Any]) -> str:
    """Returns the table in Markdown."""
    head = ["problem", "method", "cost", "claimed", "counted", "measured", "95 % interval"]
    lines = []
    for row in summary["rows"]:
        *cells, interval = exponents(row)
        lines.append([row["problem"], row["method"], row["cost"], *cells, interval or row["note"]])
    return numbers.markdown(head, lines)


def exponents(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Returns the claimed, counted and measured exponent and its interval as text."""
    found = row["measured"]
    return (
        numbers.setting(row["claimed"]),
        numbers.ratio(row["counted"]),
        "none" if found is None else numbers.ratio(found["value"]),
        "" if found is None else numbers.interval(found["low"], found["high"]),
    )
