"""Exact reference values, to hold algorithms against."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from aipod._hypergradient._bounded import solve_bounded
from aipod._hypergradient._estimate import check_problem, hypergradient
from aipod._misc.functions import keep
from aipod._misc.tree import as_arrays, axpy, cast_like, is_concrete, rounding
from aipod.problem import Bilevel, draw, hessian_product
from aipod.slots.adjoint import ConjugateGradient, solve_projected
from aipod.stepsize import check_steps


def _start(problem: Bilevel, x: PyTree, y0: PyTree | None) -> PyTree:
    check_problem(problem)
    if y0 is None:
        y0 = problem.lower_set.example()
    if y0 is None:
        raise ValueError(
            f"the shape of y cannot be told from a {type(problem.lower_set).__name__} set: pass "
            "y0=, any point in the structure of y."
        )
    x, y0 = keep(x), keep(y0)
    if is_concrete((x, y0)):
        problem.check(x, y0)
    return y0


def exact_lower(
    problem: Bilevel, x: PyTree, y0: PyTree | None = None, *, max_steps: int = 100
) -> PyTree:
    """y*(x) to working precision, by Newton steps in the null space.

    The steps come from conjugate gradients and are halved until the projected gradient shrinks. On
    a set with bounds they are made on the active face, which projected gradient steps find.
    A lower level that is not solved in `max_steps` raises `RuntimeError`; inside jit, where
    nothing can be raised, the result is NaN.

    **Arguments:**

    - `problem`, `x`: where; samplers stand for their expectations.
    - `y0`: a start in the structure of y; needed only where the set does not know it.
    - `max_steps`: at most so many Newton steps.

    !!! example
        ```python
        y_star = aipod.exact_lower(problem, x)
        ```
    """
    check_steps(max_steps, "max_steps")
    y0 = as_arrays(_start(problem, x, y0))
    x = as_arrays(keep(x))
    solve = _newton if problem.lower_set.affine else _newton_within
    y, size, scale, solved, bent = solve(problem.expected(), x, y0, max_steps)
    if is_concrete(solved) and not bool(solved):
        unsolved = (
            f"the lower level was not solved: its projected gradient is still {float(size):.3g} "
            f"(gradients here are near {float(scale):.3g})"
        )
        if bool(bent):
            raise RuntimeError(
                f"{unsolved}, where a Newton step met a direction in which the lower objective "
                "does not bend up: it is not strongly convex in y on the set. Add a term such as "
                "0.5 * mu * sum(y**2) to it; a better y0 may help."
            )
        raise RuntimeError(
            f"{unsolved} after at most {max_steps} Newton steps. Is the lower objective strongly "
            "convex in y on the set? aipod.check(problem, x, y, key=...) tells; a better y0 may "
            "help."
        )
    return jax.tree.map(lambda leaf: jnp.where(solved, leaf, np.nan), y)


@eqx.filter_jit
def _newton(
    problem: Bilevel, x: PyTree, y0: PyTree, max_steps: int
) -> tuple[PyTree, Array, Array, Array, Array]:
    """Returns y, the norm of its projected gradient, a gradient scale, and whether it converged.

    Last, whether the last Newton step met a direction without positive curvature.
    """
    batch = draw(problem.lower_samples, jax.random.key(0))
    lower_set = problem.lower_set.at(x)
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    eps = rounding(y0)

    def objective(y: PyTree) -> Array:
        return problem.lower(x, y, batch)

    def slope(y: PyTree) -> tuple[PyTree, Array]:
        gradient = jax.grad(objective)(y)
        return gradient, optax.tree.norm(lower_set.cotangent(gradient))

    def newton(carry: tuple) -> tuple:
        y, gradient, size, step, _, _ = carry
        found = solve_projected(
            objective, problem, y, gradient, rtol=eps**0.75, atol=0.0, max_steps=None
        )

        def move(length: Array) -> PyTree:
            return cast_like(lower_set.project(axpy(y, -length, found.value)), y)

        def shrink(length: Array) -> Array:
            return length / 2

        def too_long(length: Array) -> Array:
            enough = slope(move(length))[1] <= (1 - 1e-4 * length) * size
            return ~enough & (length > 1e-6)

        length = jax.lax.while_loop(too_long, shrink, jnp.ones((), dtype))
        new = move(length)
        new_gradient, new_size = slope(new)
        better = new_size < size
        kept = jax.tree.map(
            lambda a, b: jnp.where(better, a, b), (new, new_gradient), (y, gradient)
        )
        size = jnp.where(better, new_size, size)
        return (*kept, size, step + 1, better, found.curvature <= 0)

    def going(carry: tuple) -> Array:
        return carry[4] & (carry[3] < max_steps)

    start = cast_like(lower_set.project(y0), y0)
    gradient, size = slope(start)
    carry = (start, gradient, size, jnp.zeros((), int), size > 0, jnp.asarray(False))
    y, gradient, size, _, _, bent = jax.lax.while_loop(going, newton, carry)
    scale = _scale(objective, y, gradient)
    return y, size, scale, size <= eps**0.6 * scale, bent


def _scale(objective: Callable[[PyTree], Array], y: PyTree, gradient: PyTree) -> Array:
    """What a zero gradient is measured against.

    Its own part off the set, and its change over a distance of the size of y (or 1). The start does
    not count, because a function without a minimiser has small gradients far away too.
    """
    ones = optax.tree.ones_like(y)
    across = optax.tree.norm(hessian_product(objective, y, ones)) / optax.tree.norm(ones)
    return jnp.maximum(optax.tree.norm(gradient), across * jnp.maximum(1.0, optax.tree.norm(y)))


@eqx.filter_jit
def _newton_within(
    problem: Bilevel, x: PyTree, y0: PyTree, max_steps: int
) -> tuple[PyTree, Array, Array, Array, Array]:
    """`_newton` on a set with bounds, with the gradient mapping in place of the projection."""
    batch = draw(problem.lower_samples, jax.random.key(0))
    found = solve_bounded(problem, x, y0, max_steps)

    def objective(y: PyTree) -> Array:
        return problem.lower(x, y, batch)

    scale = _scale(objective, found.y, jax.grad(objective)(found.y))
    eps = rounding(y0)
    return found.y, found.size, scale, found.size <= eps**0.6 * scale, found.bent


def exact_hypergradient(problem: Bilevel, x: PyTree, y0: PyTree | None = None) -> PyTree:
    """grad F(x) to working precision: the hypergradient at `exact_lower(problem, x)`.

    !!! example
        ```python
        gradient = aipod.exact_hypergradient(problem, x)
        ```
    """
    y = exact_lower(problem, x, y0)
    return hypergradient(problem, x, y, ConjugateGradient(rtol=rounding(y) ** 0.9))


def stationarity(problem: Bilevel, x: PyTree, y0: PyTree | None = None) -> Array:
    """||grad F(x)||^2 in the P_x norm (`stationary`): zero exactly at stationary points.

    Where the upper set has bounds it is ||x - project(x - grad F(x))||^2, the squared norm of the
    gradient mapping; for x in an affine set both are the same.

    !!! example
        ```python
        aipod.stationarity(problem, x) < 1e-8
        ```
    """
    gradient = exact_hypergradient(problem, x, y0)
    upper_set = problem.upper_set
    if not upper_set.affine:
        x = as_arrays(keep(x))
        moved = optax.tree.sub(x, upper_set.project(optax.tree.sub(x, upper_set.riesz(gradient))))
        return optax.tree.vdot(moved, moved)
    # Projected on both sides: otherwise rounding could make a tiny value negative.
    along = upper_set.tangent(upper_set.riesz(gradient))
    return optax.tree.vdot(upper_set.cotangent(gradient), along)
