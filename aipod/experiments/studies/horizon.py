"""Runs of K outer steps for several K, as the theorems are about them.

A theorem fixes the step sizes for a run of K steps and bounds the average of the error over that
run. So a point of a curve here is a whole run: its average error, in expectation over seeds, and
what it cost.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.algorithms import Alternating
from aipod.experiments.numbers import number
from aipod.problem import Bilevel

# Shares of the largest K, one for each point of a curve: two and a half decades.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# Errors are looked at so often in a run, closer together at its beginning, where they change most.
_POINTS = 256
_COUNTS = (
    "upper_projections",
    "lower_projections",
    "adjoint_projections",
    "upper_samples",
    "lower_samples",
)

# Hears in words how a measurement gets on.
Told = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, where runs start, and the error that is averaged: (x, y) -> scalar."""

    problem: Bilevel
    x0: PyTree
    y0: PyTree
    error: Callable[[PyTree, PyTree], Array]


@dataclasses.dataclass(frozen=True)
class Curve:
    """For each K the average error of every seed, and the mean counts of a run."""

    steps: np.ndarray
    errors: np.ndarray
    counts: dict[str, np.ndarray]

    @property
    def error(self) -> np.ndarray:
        """The expectation over seeds, for each K."""
        return self.errors.mean(axis=1)

    @property
    def spread(self) -> np.ndarray:
        """The standard error of that expectation."""
        seeds = self.errors.shape[1]
        if seeds == 1:
            return np.full(len(self.errors), np.nan)
        return self.errors.std(axis=1, ddof=1) / np.sqrt(seeds)

    @property
    def samples(self) -> np.ndarray:
        return self.counts["upper_samples"] + self.counts["lower_samples"]

    def words(self) -> str:
        """In a line, for whoever waits."""
        pairs = zip(self.steps, self.error, strict=True)
        return ", ".join(f"{steps:,} → {number(error)}" for steps, error in pairs)

    def plain(self) -> dict[str, Any]:
        """As lists, for a file."""
        return {
            "steps": self.steps.tolist(),
            "error": self.error.tolist(),
            "standard_error": self.spread.tolist(),
            "samples": self.samples.tolist(),
        } | {name: count.tolist() for name, count in self.counts.items()}


def horizons(steps: int, grid: Sequence[float] = GRID) -> list[int]:
    """Every K, from the largest and the shares of it."""
    return sorted({max(3, round(share * steps)) for share in grid})


def sweep(
    make: Callable[[int], Alternating],
    setting: Setting,
    horizons: Sequence[int],
    *,
    seeds: int,
    key: PRNGKeyArray,
) -> Curve:
    """A run of `make(K)` for each K and each seed."""
    errors, totals = [], []
    for steps in horizons:
        solver = make(steps)
        state = solver.init(setting.problem, setting.x0, setting.y0)
        keys = jax.random.split(jax.random.fold_in(key, steps), seeds)
        count = jnp.asarray(steps, jnp.int32)
        error, spent = _runs(solver, setting.problem, state, setting.error, count, keys)
        errors.append(np.asarray(error))
        totals.append(spent)
    return Curve(
        np.asarray(horizons),
        np.stack(errors),
        {name: np.array([float(getattr(t, name)) for t in totals]) for name in _COUNTS},
    )


# K is an argument, so that one program serves all K whose solvers differ in numbers only.
@eqx.filter_jit
def _runs(
    solver: Alternating,
    problem: Bilevel,
    state: Any,
    error: Callable[[PyTree, PyTree], Array],
    steps: Array,
    keys: PRNGKeyArray,
) -> tuple[Array, Any]:
    marks = jnp.round(steps * (jnp.arange(_POINTS + 1) / _POINTS) ** 3).astype(jnp.int32)

    def one(key: PRNGKeyArray) -> tuple[Array, Any]:
        def block(state: Any, ends: tuple[Array, Array]) -> tuple[Any, Array]:
            here = error(state.x, state.y)

            def step(_: Array, state: Any) -> Any:
                return solver.traced_step(problem, state, key)

            return jax.lax.fori_loop(*ends, step, state), here

        last, errors = jax.lax.scan(block, state, (marks[:-1], marks[1:]))
        errors = jnp.append(errors, error(last.x, last.y))
        weights = (marks[1:] - marks[:-1]) / steps
        return jnp.sum(weights * (errors[1:] + errors[:-1]) / 2), last.counts

    errors, counts = jax.vmap(one)(keys)
    return errors, jax.tree.map(jnp.mean, counts)
