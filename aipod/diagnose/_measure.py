"""What `check` measures: derivatives against finite differences."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._hypergradient import exact_hypergradient, exact_lower
from aipod.problem import Bilevel, Objective
from aipod.sets._inputs import total_size


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

        # At a stationary point the gradient is only rounding error, but a step away it is not.
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
    """How fast the hypergradient changes along its own direction; where it is 0, a random one."""
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
    # A smaller change is within the error of the two hypergradients: F is linear here.
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

    The best of several steps counts: a kink or a strong curvature spoils the long ones, rounding
    the short ones, and a wrong derivative all of them. NaN means that rounding hides whether the
    two agree to `tolerance`, infinity that the function is not finite where it was evaluated.

    **Arguments:**

    - `typical`: how large such slopes usually are; this one may be small by chance.
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
