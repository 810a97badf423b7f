"""The smallest and the largest eigenvalue of the lower Hessian, from products with it alone."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import cast_like
from aipod.diagnose._findings import Spectrum
from aipod.diagnose._measure import precision
from aipod.problem import Bilevel, draw, hessian_product
from aipod.sets import AbstractSet
from aipod.sets._inputs import total_size

# Up to this dimension Lanczos is exact; beyond it the ends of the spectrum converge first.
_LANCZOS_STEPS = 100


def spectrum(problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray) -> Spectrum:
    """The ends of the spectrum of grad_yy g, by Lanczos from a random start."""

    def product(v: np.ndarray) -> np.ndarray:
        return np.asarray(_curvature_product(problem, x, y, v, kernel=False), np.float64)

    return _lanczos(product, lambda v: v, _random(y, key), precision(y))


def kernel_spectrum(problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray) -> Spectrum | None:
    """The same for P' grad_yy g P on Ker A; None where Ker A is {0}."""

    def product(v: np.ndarray) -> np.ndarray:
        return np.asarray(_curvature_product(problem, x, y, v, kernel=True), np.float64)

    def restrict(v: np.ndarray) -> np.ndarray:
        return np.asarray(_on_kernel(problem.lower_set, y, v), np.float64)

    start, eps = _random(y, key), precision(y)
    inside = restrict(start)
    if np.linalg.norm(inside) <= eps**0.5 * np.linalg.norm(start):
        return None
    return _lanczos(product, restrict, inside, eps)


def _random(y: PyTree, key: PRNGKeyArray) -> np.ndarray:
    return np.asarray(jax.random.normal(key, (total_size(y),)), np.float64)


def _scaled(lower_set: AbstractSet, y: PyTree, v: np.ndarray) -> tuple[PyTree, PyTree]:
    """s and s v, with s^2 = riesz: in terms of v the set's inner product is the usual one."""
    flat, restore = ravel_pytree(y)
    scale = jax.tree.map(jnp.sqrt, lower_set.riesz(optax.tree.ones_like(y)))
    return scale, cast_like(optax.tree.mul(scale, restore(jnp.asarray(v, flat.dtype))), y)


@eqx.filter_jit
def _on_kernel(lower_set: AbstractSet, y: PyTree, v: np.ndarray) -> Array:
    scale, direction = _scaled(lower_set, y, v)
    return ravel_pytree(optax.tree.div(lower_set.tangent(direction), scale))[0]


@eqx.filter_jit
def _curvature_product(
    problem: Bilevel, x: PyTree, y: PyTree, v: np.ndarray, kernel: bool
) -> Array:
    lower_set, batch = problem.lower_set, draw(problem.lower_samples, jax.random.key(0))
    scale, direction = _scaled(lower_set, y, v)
    if kernel:
        direction = cast_like(lower_set.tangent(direction), y)
    image = hessian_product(lambda t: problem.lower(x, t, batch), y, direction)
    if kernel:
        image = lower_set.cotangent(image)
    return ravel_pytree(optax.tree.mul(scale, image))[0]


def _lanczos(
    product: Callable[[np.ndarray], np.ndarray],
    restrict: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    eps: float,
) -> Spectrum:
    """Lanczos with full reorthogonalisation, on the subspace that `restrict` projects to."""
    limit = min(start.size, _LANCZOS_STEPS)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []

    def off_basis(v: np.ndarray) -> np.ndarray:
        so_far = np.stack(basis)
        for _ in range(2):  # one pass leaves rounding errors, two are enough
            v = v - so_far.T @ (so_far @ v)
        return v

    while True:
        image = product(basis[-1])
        if not np.all(np.isfinite(image)):
            return Spectrum(math.nan, math.nan)
        diagonal.append(float(basis[-1] @ image))
        image = off_basis(image)
        rest = float(np.linalg.norm(image))
        if len(basis) >= limit or rest <= eps**0.75 * max(map(abs, diagonal + beside)):
            break
        # The division magnifies rounding errors outside Ker A, where they would be taken for a
        # direction without curvature.
        image = off_basis(restrict(image / rest))
        length = float(np.linalg.norm(image))
        if length < 0.5:
            break
        beside.append(rest)
        basis.append(image / length)
    values, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside)
    errors = rest * np.abs(vectors[-1])
    ends = [0, -1]
    settled = len(basis) < _LANCZOS_STEPS or bool(
        np.all(errors[ends] <= 0.01 * np.abs(values[ends]))
    )
    return Spectrum(float(values[0]), float(values[-1]), settled)
