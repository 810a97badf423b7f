"""The lower level on a set with bounds, to working precision."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._hypergradient._face import largest_curvature
from aipod._misc.tree import axpy, cast_like, rounding
from aipod.problem import Bilevel, draw
from aipod.slots.adjoint import solve_projected

# Newton's step is enough where it leaves at most this share of the gradient mapping.
_ENOUGH = 0.5
# How often a Newton step is halved, and the steps of the first and of the longest loop of gradient
# descent.
_HALVINGS, _FIRST, _LONGEST = 6, 20, 20_000


class Search(NamedTuple):
    """Where the search stands.

    - `size`: the norm of the gradient mapping l (y - project(y - grad g / l)).
    - `steepness`: l, at least the largest curvature that was met.
    - `length`: the steps of the next loop of gradient descent.
    - `bent`: whether a Newton step met a direction without positive curvature.
    """

    y: PyTree
    size: Array
    steepness: Array
    length: Array
    steps: Array
    going: Array
    bent: Array


@eqx.filter_jit
def solve_bounded(problem: Bilevel, x: PyTree, y0: PyTree, max_steps: int) -> Search:
    """Newton steps on the face that a projected gradient step lands on, or many such steps.

    Near a solution with the right multipliers that face is the active one, and Newton's method
    solves the rest. Where it does not, accelerated projected gradient steps go on, which find the
    face sooner or later.
    """
    batch = draw(problem.lower_samples, jax.random.key(0))
    lower_set = problem.lower_set.at(x)
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    eps = rounding(y0)

    def objective(y: PyTree) -> Array:
        return problem.lower(x, y, batch)

    slope = jax.grad(objective)

    def downhill(y: PyTree) -> PyTree:
        return lower_set.riesz(slope(y))

    def ahead(y: PyTree, steepness: Array) -> PyTree:
        return axpy(y, -1 / steepness, downhill(y))

    def stepped(y: PyTree, steepness: Array) -> PyTree:
        return cast_like(lower_set.project(ahead(y, steepness)), y)

    def measured(y: PyTree, steepness: Array) -> Array:
        return steepness * optax.tree.norm(optax.tree.sub(y, stepped(y, steepness)))

    def newton(search: Search, start: PyTree, met: PyTree) -> tuple[PyTree, Array, Array]:
        face = lower_set.holding(lower_set.sides(lower_set.single(start), met))
        on_it = dataclasses.replace(problem, lower_set=face)
        found = solve_projected(
            objective, on_it, start, slope(start), rtol=eps**0.75, atol=0.0, max_steps=None
        )

        def too_long(carry: tuple[Array, PyTree, Array]) -> Array:
            length, _, size = carry
            return ~(size < search.size) & (length > 0.5**_HALVINGS)

        def halved(carry: tuple[Array, PyTree, Array]) -> tuple[Array, PyTree, Array]:
            length = carry[0] / 2
            point = cast_like(lower_set.project(axpy(start, -length, found.value)), start)
            return length, point, measured(point, search.steepness)

        # The first step is a whole one.
        none = (2 * jnp.ones((), dtype), start, jnp.full((), jnp.inf, dtype))
        _, point, size = jax.lax.while_loop(too_long, halved, none)
        return point, size, found.curvature <= 0

    def descent(search: Search) -> tuple[PyTree, Array, Array]:
        """Accelerated steps that forget their speed where it points uphill."""

        def one(_: Array, carry: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, PyTree, Array]:
            y, fast, momentum = carry
            new = stepped(fast, search.steepness)
            moved = optax.tree.sub(new, y)
            uphill = optax.tree.vdot(optax.tree.sub(fast, new), moved) > 0
            following = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
            share = jnp.where(uphill, 0.0, (momentum - 1) / following)
            following = jnp.where(uphill, 1.0, following).astype(momentum.dtype)
            return new, axpy(new, share, moved), following

        first = jnp.ones((), dtype)
        start = (search.y, search.y, first)
        point = jax.lax.fori_loop(0, search.length, one, start)[0]
        size = measured(point, search.steepness)
        # Where the steps were too long for the curvature on the way.
        steepness = search.steepness * jnp.where(size < search.size, 1.0, 2.0)
        return point, size, steepness

    def better(search: Search, point: PyTree, size: Array) -> Search:
        improved = size < search.size
        y = jax.tree.map(lambda a, b: jnp.where(improved, a, b), point, search.y)
        return search._replace(y=y, size=jnp.where(improved, size, search.size))

    def body(search: Search) -> Search:
        landed, met = lower_set.land(ahead(search.y, search.steepness))
        landed = cast_like(landed, search.y)
        size = search.steepness * optax.tree.norm(optax.tree.sub(search.y, landed))
        search = search._replace(size=size)
        point, size, bent = newton(search, landed, met)
        good = size <= _ENOUGH * search.size
        after = better(search, point, size)

        def slowly() -> Search:
            point, size, steepness = descent(after)
            length = jnp.minimum(4 * after.length, _LONGEST)
            return better(after, point, size)._replace(steepness=steepness, length=length)

        new = jax.lax.cond(good, lambda: after, slowly)
        # At rounding error neither helps, however many steps are made.
        scale = new.steepness * optax.tree.norm(new.y)
        small = new.size <= eps**0.8 * (scale + optax.tree.norm(downhill(new.y)))
        done = (new.size >= search.size) & (small | (search.length >= _LONGEST))
        tiny = new.size <= 4 * eps * scale
        return new._replace(steps=search.steps + 1, going=~(done | tiny), bent=bent)

    y = cast_like(lower_set.project(y0), y0)
    start = Search(
        y,
        jnp.full((), jnp.inf, dtype),
        largest_curvature(problem, x, y, batch).astype(dtype),
        jnp.asarray(_FIRST),
        jnp.zeros((), int),
        jnp.asarray(True),
        jnp.asarray(False),
    )
    return jax.lax.while_loop(lambda s: s.going & (s.steps < max_steps), body, start)
