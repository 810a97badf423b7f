"""Measurements for small applications, whose problems are solved exactly at every record."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._hypergradient import exact_lower, hypergradient
from aipod.problem import Bilevel, draw
from aipod.slots.adjoint import ConjugateGradient


def exactly(problem: Bilevel, x: PyTree, y: PyTree) -> tuple[PyTree, dict[str, Array]]:
    """Returns y*(x), and a dictionary of F(x), its stationarity, and the distance of y to y*(x)."""
    best = exact_lower(problem, x, y)
    batch = draw(problem.expected().upper_samples, jax.random.key(0))
    eps = float(jnp.finfo(jnp.result_type(*jax.tree.leaves(y))).eps)
    slope = hypergradient(problem, x, best, ConjugateGradient(rtol=eps**0.9))
    along = problem.upper_set.tangent(problem.upper_set.riesz(slope))
    return best, {
        "objective": problem.upper(x, best, batch),
        "stationarity": optax.tree.vdot(along, along),
        "lower_gap": optax.tree.norm(optax.tree.sub(y, best)) ** 2,
    }
