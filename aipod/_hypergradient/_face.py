"""The active face of a lower set with bounds, at a y that solves the lower level."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel, hessian_product
from aipod.stepsize import power_iteration

# Enough for a step that is right to a factor of 2.
_ITERATIONS = 20


def largest_curvature(problem: Bilevel, x: PyTree, y: PyTree, batch: Any) -> Array:
    """The largest curvature of g(x, .) at y, roughly; 1 where there is none."""
    shaken = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), y)
    start = jax.tree.map(lambda a, b: a.astype(b.dtype), shaken, y)

    def product(v: PyTree) -> PyTree:
        return hessian_product(lambda t: problem.lower(x, t, batch), y, v)

    found, _ = power_iteration(product, start, _ITERATIONS)
    return jnp.where((found > 0) & jnp.isfinite(found), found, 1.0)


def at_face(problem: Bilevel, x: PyTree, y: PyTree, batch: Any) -> Bilevel:
    """The problem with the face at y in place of a lower set with bounds; else the problem.

    The face is decided by a step of gradient descent on g, whose length weighs errors of y against
    those of the gradient.
    """
    if problem.lower_set.affine:
        return problem
    slope = jax.grad(problem.lower, argnums=1)(x, y, batch)
    step = 1 / largest_curvature(problem, x, y, batch)
    face = problem.lower_set.face(y, problem.lower_set.riesz(slope), x, step=step)
    return dataclasses.replace(problem, lower_set=face)
