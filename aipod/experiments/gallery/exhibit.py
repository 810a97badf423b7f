"""One problem of the gallery, its start and its reference solution."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._hypergradient import exact_lower
from aipod.problem import Bilevel, draw


class Setting(NamedTuple):
    """A problem and where it starts."""

    problem: Bilevel
    x0: PyTree
    y0: PyTree


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A problem with a known solution, which other methods than the solvers here have found.

    - `world`: what the problem is about, in one line.
    - `convex`: why the lower level is strongly convex on its set.
    - `reference`: how the reference solution was found.
    - `start`, `best`: F at x0 and at the reference solution.
    - `solution`: the reference solution, in the structure of x0.
    - `steps`: the budget, in outer steps.
    """

    name: str
    world: str
    convex: str
    problem: Bilevel
    x0: PyTree
    y0: PyTree
    reference: str
    start: float
    best: float
    solution: PyTree
    steps: int = 1000

    def value(self, x: PyTree) -> float:
        """F(x) = f(x, y*(x)) on all data, at the projection of x on the upper set.

        To working precision: call it in float64. A lower level that cannot be solved at x raises
        `RuntimeError`.
        """
        x = _feasible(self.problem, x)
        return float(_upper(self.problem, x, exact_lower(self.problem, x, self.y0)))

    def share(self, value: float) -> float:
        """How much of the possible improvement this value of F is: 0 at the start, 1 at the best.

        Slightly more than 1 is possible where F is not convex.
        """
        return (self.start - value) / (self.start - self.best)

    @property
    def federated(self) -> bool:
        """Whether the problem is a federation."""
        return self.problem.upper_set.federated


# Compiled: one by one, the small operations of a first call would take longer than the rest of it.
@eqx.filter_jit
def _feasible(problem: Bilevel, x: PyTree) -> PyTree:
    return problem.upper_set.project(x)


@eqx.filter_jit
def _upper(problem: Bilevel, x: PyTree, y: PyTree) -> Array:
    batch = draw(problem.expected().upper_samples, jax.random.key(0))
    return problem.upper(x, y, batch)


def as_floats(tree: PyTree) -> PyTree:
    """The tree as arrays of the default precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)
