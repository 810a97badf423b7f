"""What `check` measures: ranks, curvatures and finite differences."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._findings import Spectrum
from aipod.hypergradient import exact_hypergradient, exact_lower
from aipod.problem import Bilevel, Objective
from aipod.sampling import draw
from aipod.sets import AbstractSet, Budget, Consensus, Free, Product
from aipod.sets._affine import AbstractLinearSet
from aipod.sets._base import total_size
from aipod.stepsize import hessian_product

# Lanczos is exact up to this dimension; beyond it the ends of a spectrum settle first.
_LANCZOS_STEPS = 100


def precision(*trees: PyTree) -> float:
    """The unit roundoff of the least precise leaf."""
    return max(float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in jax.tree.leaves(trees))


def norm(tree: PyTree) -> float:
    return float(optax.tree.norm(tree))


def unit_direction(tree: PyTree, key: PRNGKeyArray) -> PyTree:
    direction = optax.tree.random_like(key, tree, jax.random.normal)
    return optax.tree.scale(1 / norm(direction), direction)


def same_batch(first: Any, second: Any) -> bool:
    def plain(leaf: Any) -> np.ndarray:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(leaves[0]) == len(leaves[1]) and all(
        np.array_equal(plain(a), plain(b)) for a, b in zip(*leaves, strict=True)
    )


def constraints(set_: AbstractSet, point: PyTree) -> tuple[int | None, int | None]:
    """How many constraints a set puts on a point, and their rank; None for what is not known."""
    if isinstance(set_, Free):
        return 0, 0
    if isinstance(set_, Budget):
        return 1, 1
    if isinstance(set_, Consensus):
        clients = jnp.shape(jax.tree.leaves(point)[0])[0]
        rank = total_size(point) // clients * (clients - 1)
        return rank, rank
    if isinstance(set_, AbstractLinearSet):
        rows = total_size(set_.target)
        # A Flow of several commodities has a target for each of them and one map for all.
        own = sum(s.size for s in jax.tree.leaves(set_.map.out_structure))
        return rows, None if set_.rank is None else set_.rank * (rows // max(own, 1))
    if isinstance(set_, Product):
        sets = set_.parts
        labels = sets if isinstance(sets, dict) else range(len(sets))
        counts, ranks = zip(*(constraints(sets[i], point[i]) for i in labels), strict=True)
        return _total(counts), _total(ranks)
    return None, None


def _total(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@eqx.filter_jit
def values_and_gradients(
    objective: Objective, x: PyTree, y: PyTree, batch: Any
) -> tuple[Array, tuple[PyTree, PyTree]]:
    return jax.value_and_grad(objective, argnums=(0, 1))(x, y, batch)


@eqx.filter_jit
def central_difference(
    objective: Objective, x: PyTree, y: PyTree, batch: Any, move: tuple[PyTree, PyTree]
) -> Array:
    """objective at (x, y) + move, less objective at (x, y) - move."""
    ahead = objective(optax.tree.add(x, move[0]), optax.tree.add(y, move[1]), batch)
    return ahead - objective(optax.tree.sub(x, move[0]), optax.tree.sub(y, move[1]), batch)


def gradient_error(
    objective: Objective, x: PyTree, y: PyTree, batch: Any, index: int, key: PRNGKeyArray
) -> float:
    """`mismatch` of the gradient in x (index 0) or y (index 1), the worst of three directions."""
    value, slopes = values_and_gradients(objective, x, y, batch)
    tree, gradient, eps = (x, y)[index], slopes[index], precision(x, y, value)
    length = eps ** (1 / 3) * max(1.0, norm(tree))

    def along(direction: PyTree) -> float:
        def difference(step: float) -> float:
            move = [optax.tree.zeros_like(x), optax.tree.zeros_like(y)]
            move[index] = optax.tree.scale(step, direction)
            return float(central_difference(objective, x, y, batch, (move[0], move[1])))

        # At a stationary point the gradient is rounding error; a step away it is not.
        point = [x, y]
        point[index] = optax.tree.add_scale(tree, length, direction)
        away = norm(values_and_gradients(objective, point[0], point[1], batch)[1][index])
        size = max(norm(gradient), away if math.isfinite(away) else 0.0)
        return mismatch(
            difference,
            float(optax.tree.vdot(gradient, direction)),
            typical=size / math.sqrt(total_size(tree)),
            rounding=10 * eps * abs(float(value)),
            tolerance=eps**0.25,
            steps=(length, 0.1 * length),
        )

    errors = [along(unit_direction(tree, k)) for k in jax.random.split(key, 3)]
    return max((error for error in errors if not math.isnan(error)), default=math.nan)


def upper_curvature(
    problem: Bilevel, x: PyTree, y0: PyTree, gradient: PyTree, key: PRNGKeyArray
) -> float:
    """How fast the hypergradient changes along itself in the upper set; where it is 0, anywhere."""
    upper_set = problem.upper_set

    def direction(slope: PyTree) -> PyTree:
        return upper_set.tangent(upper_set.riesz(slope))

    along = direction(gradient)
    size = norm(along)
    if size == 0:
        along = upper_set.tangent(unit_direction(x, key))
    length = precision(x) ** 0.25 * max(1.0, norm(x))
    moved = optax.tree.add_scale(x, length / norm(along), along)
    change = norm(direction(optax.tree.sub(exact_hypergradient(problem, moved, y0), gradient)))
    # Less than this is the error of the two hypergradients: F is linear here.
    return change / length if change > precision(x) ** 0.5 * size else 0.0


def hypergradient_error(
    problem: Bilevel,
    x: PyTree,
    y0: PyTree,
    gradient: PyTree,
    curvature: float,
    batch: Any,
    key: PRNGKeyArray,
) -> float:
    """`mismatch` of the hypergradient along one random direction of the upper set."""
    upper_set, eps = problem.upper_set, precision(x)
    direction = upper_set.tangent(unit_direction(x, key))
    direction = optax.tree.scale(1 / norm(direction), direction)

    def objective(step: float) -> float:
        moved = optax.tree.add_scale(x, step, direction)
        return float(problem.upper(moved, exact_lower(problem, moved, y0), batch))

    length = eps**0.25 * max(1.0, norm(x))
    size = max(norm(upper_set.cotangent(gradient)), curvature * length)
    return mismatch(
        lambda step: objective(step) - objective(-step),
        float(optax.tree.vdot(gradient, direction)),
        typical=size / math.sqrt(total_size(x)),
        # y* is known to a little less than full precision.
        rounding=1e3 * eps * abs(objective(0.0)),
        tolerance=eps**0.25,
        steps=(length, 0.1 * length),
    )


def mismatch(
    difference: Callable[[float], float],
    slope: float,
    *,
    typical: float,
    rounding: float,
    tolerance: float,
    steps: tuple[float, ...],
) -> float:
    """How far `slope` is from difference(step) / (2 step), relative to the larger.

    The best of several steps counts, since a kink or a strong curvature spoils the long ones and
    rounding the short ones, while a wrong derivative spoils all. NaN says that rounding hides
    whether they agree to `tolerance`, infinity that the function is not finite so near.

    **Arguments:**

    - `typical`: the size of such slopes, where this one is small by chance.
    - `rounding`: the error of difference(step).
    """
    errors = []
    for step in steps:
        measured = difference(step) / (2 * step)
        gap, noise = abs(measured - slope), rounding / step
        size = max(abs(measured), abs(slope), typical)
        if not math.isfinite(measured):
            errors.append(math.inf)
        elif gap == 0:
            errors.append(0.0)
        elif gap <= noise and noise > tolerance * size:
            errors.append(math.nan)
        else:
            errors.append(gap / size)
    told = [error for error in errors if not math.isnan(error)]
    return min(told, default=math.nan)


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
    """s and s v with s^2 = riesz: in v the set's inner product is the usual one."""
    flat, restore = ravel_pytree(y)
    scale = jax.tree.map(jnp.sqrt, lower_set.riesz(optax.tree.ones_like(y)))
    return scale, optax.tree.mul(scale, restore(jnp.asarray(v, flat.dtype)))


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
        direction = lower_set.tangent(direction)
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
    """Full reorthogonalisation, on the subspace that `restrict` projects to."""
    limit = min(start.size, _LANCZOS_STEPS)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []

    def off_basis(v: np.ndarray) -> np.ndarray:
        so_far = np.stack(basis)
        for _ in range(2):  # once leaves what rounding hid; twice is enough
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
        # Scaled up, rounding error off Ker A would pass for a direction of no curvature.
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
