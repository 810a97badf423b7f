"""Runs of K outer steps for several K, as in the theorems.

A theorem fixes the step sizes for a run of K steps and bounds the average error over that run. A
point of a curve is therefore a whole run: its average error, averaged over seeds, and its cost.
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

# K as shares of the largest K, over two and a half decades.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# How often a run evaluates the error; more often at its beginning, where it changes most.
_POINTS = 256
_COUNTS = (
    "upper_projections",
    "lower_projections",
    "adjoint_projections",
    "upper_samples",
    "lower_samples",
)

# Receives progress messages.
Told = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, its starting point, and the error to average: (x, y) -> scalar."""

    problem: Bilevel
    x0: PyTree
    y0: PyTree
    error: Callable[[PyTree, PyTree], Array]


@dataclasses.dataclass(frozen=True)
class Curve:
    """For each K, the average error of every seed and the mean counts of a run."""

    steps: np.ndarray
    errors: np.ndarray
    counts: dict[str, np.ndarray]

    @property
    def error(self) -> np.ndarray:
        """The mean over seeds, for each K."""
        return self.errors.mean(axis=1)

    @property
    def spread(self) -> np.ndarray:
        """The standard error of that mean."""
        seeds = self.errors.shape[1]
        if seeds == 1:
            return np.full(len(self.errors), np.nan)
        return self.errors.std(axis=1, ddof=1) / np.sqrt(seeds)

    @property
    def samples(self) -> np.ndarray:
        return self.counts["upper_samples"] + self.counts["lower_samples"]

    def words(self) -> str:
        """One line, for progress messages."""
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


def joined(curves: Sequence[Curve]) -> Curve:
    """One curve of all points."""
    return Curve(
        np.concatenate([curve.steps for curve in curves]),
        np.concatenate([curve.errors for curve in curves]),
        {name: np.concatenate([curve.counts[name] for curve in curves]) for name in _COUNTS},
    )


def horizons(steps: int, grid: Sequence[float] = GRID) -> list[int]:
    """Returns every K, in increasing order."""
    return sorted({max(3, round(share * steps)) for share in grid})


def sweep(
    make: Callable[[int], Alternating],
    setting: Setting,
    horizons: Sequence[int],
    *,
    seeds: int,
    key: PRNGKeyArray,
) -> Curve:
    """Runs `make(K)` for each K and each seed."""
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


# K is an argument, so that solvers that differ only in numbers share one compiled program.
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
