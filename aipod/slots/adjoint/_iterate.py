"""Conjugate gradients that are right in single precision, for millions of unknowns.

Lineax's own refuse a step whose curvature is below about 200 eps n times the residual: in float32
that is every step from some ten thousand unknowns on, and the result is NaN. These stop at a
direction of negative curvature or when the residual stalls, keep the best point, and say which.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy

# Iterations between two looks at the true residual, from which the updated one drifts away.
_RENEW = 10
# Iterations without a smaller residual after which rounding is all that is left to see.
_PATIENCE = (100, 2000)


class Iteration(NamedTuple):
    """Where conjugate gradients ended.

    - `value`: the point of the smallest residual.
    - `steps`: how many products with the matrix were made, but for the renewals.
    - `residual`: the norm of its residual.
    - `curvature`: the smallest curvature p' A p / p' p that was met; not positive where the matrix
        is not positive definite, and the iteration ended there.
    """

    value: PyTree
    steps: Array
    residual: Array
    curvature: Array


class _Carry(NamedTuple):
    point: PyTree
    residual: PyTree
    direction: PyTree
    gamma: Array
    step: Array
    best: PyTree
    smallest: Array
    since: Array
    curvature: Array


def conjugate_gradients(
    matvec: Callable[[PyTree], PyTree], right: PyTree, *, tolerance: Array | float, max_steps: int
) -> Iteration:
    """The solution of A v = right, for a symmetric positive semidefinite map, from v = 0.

    Ends when the norm of the residual is at most `tolerance`.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(right))
    patience = min(max(2 * size, _PATIENCE[0]), _PATIENCE[1])

    def going(carry: _Carry) -> Array:
        wanted = carry.smallest > tolerance
        return (
            wanted
            & (carry.curvature > 0)
            & (carry.step < max_steps)
            & (carry.since < patience)
            & jnp.isfinite(carry.gamma)
        )

    def advance(carry: _Carry) -> _Carry:
        image = matvec(carry.direction)
        along = optax.tree.vdot(carry.direction, image)
        squared = optax.tree.vdot(carry.direction, carry.direction)
        bends = along > 0
        length = jnp.where(bends, carry.gamma / jnp.where(bends, along, 1.0), 0.0)
        point = axpy(carry.point, length, carry.direction)
        step = carry.step + 1

        def renewed() -> PyTree:
            return axpy(right, -1.0, matvec(point))

        def updated() -> PyTree:
            return axpy(carry.residual, -length, image)

        residual = jax.lax.cond(step % _RENEW == 0, renewed, updated)
        gamma = optax.tree.vdot(residual, residual)
        norm = jnp.sqrt(gamma)
        better = norm < carry.smallest
        direction = axpy(residual, gamma / carry.gamma, carry.direction)
        curvature = jnp.minimum(carry.curvature, along / squared)
        return _Carry(
            point,
            residual,
            direction,
            gamma,
            step,
            jax.tree.map(lambda a, b: jnp.where(better, a, b), point, carry.best),
            jnp.where(better, norm, carry.smallest),
            jnp.where(better, 0, carry.since + 1),
            curvature,
        )

    zero = optax.tree.zeros_like(right)
    gamma = optax.tree.vdot(right, right)
    none = jnp.zeros((), jnp.int32)
    far = jnp.full_like(gamma, jnp.inf)
    start = _Carry(zero, right, right, gamma, none, zero, jnp.sqrt(gamma), none, far)
    end: Any = jax.lax.while_loop(going, advance, start)
    return Iteration(end.best, end.step, end.smallest, end.curvature)
