"""Sizes that a statement about convergence compares with: of x, of rounding, of curvature."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aipod.algorithms import State


def rounding_of(state: State, seen: Any) -> float:
    """The squared size of the rounding error in a hypergradient that is a difference of points."""
    rate = float(np.mean(seen.rate))
    if not seen.difference or rate <= 0:
        return 0.0
    clients = np.size(seen.rate)
    return (eps_of(state) * size_of(state.x) / rate / 2) ** 2 / clients


def eps_of(state: State) -> float:
    """The relative rounding error of x."""
    return float(jnp.finfo(jnp.result_type(float, *jax.tree.leaves(state.x))).eps)


def size_of(tree: Any) -> float:
    """The length of a tree of arrays."""
    return math.hypot(*(np.linalg.norm(np.ravel(leaf)) for leaf in jax.tree.leaves(tree)))


def steeper_of(state: State) -> float:
    """How many times larger the curvature of the lower level is than at the start."""
    if state.curvature is None or not float(np.max(state.curvature.first)) > 0:
        return 1.0
    return float(np.max(state.curvature.estimate)) / float(np.max(state.curvature.first))


def flat_of(state: State) -> bool:
    """Whether the lower level has no curvature."""
    return (
        state.curvature is not None
        and int(state.step) > 0
        and not np.max(state.curvature.estimate) > 0
    )
