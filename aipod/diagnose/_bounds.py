"""Bounds: which are active at the solution of the lower level, and whether that is clear-cut."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod._hypergradient import exact_lower
from aipod._hypergradient._face import largest_curvature
from aipod.diagnose._findings import Notes, count, first_line
from aipod.problem import Bilevel, draw
from aipod.sets import AbstractSet
from aipod.sets._inputs import total_size

# A multiplier, over the curvature, or a distance from a bound below this share of y counts as 0.
_ZERO = 1e-5


def unbounded(problem: Bilevel, y: PyTree, x: PyTree) -> Bilevel:
    """The problem with the equalities of its lower set alone."""
    if problem.lower_set.affine:
        return problem
    return dataclasses.replace(problem, lower_set=_without_bounds(problem.lower_set, y, x))


def _without_bounds(lower_set: AbstractSet, y: PyTree, x: PyTree) -> AbstractSet:
    one = lower_set.single(y)
    marks = lower_set.sides(one, optax.tree.zeros_like(one), x)
    return lower_set.holding(jax.tree.map(jnp.zeros_like, marks))


def along_bounds(problem: Bilevel, x: PyTree) -> Bilevel:
    """The problem with the face on which x lies, an affine set, in place of its upper set."""
    if problem.upper_set.affine:
        return problem
    face = problem.upper_set.face(x, optax.tree.zeros_like(x))
    return dataclasses.replace(problem, upper_set=face)


def in_a_corner(problem: Bilevel, x: PyTree) -> bool:
    """Whether no direction is left on the face of the upper set on which x lies."""
    if problem.upper_set.affine:
        return False
    probe = optax.tree.random_like(jax.random.key(0), x, jax.random.normal)
    along = along_bounds(problem, x).upper_set.tangent(probe)
    return bool(optax.tree.norm(along) <= 1e-6 * optax.tree.norm(probe))


def check_bounds(notes: Notes, problem: Bilevel, x: PyTree, y0: PyTree) -> None:
    """Counts the active bounds of the lower level and looks for degenerate ones."""
    try:
        y = exact_lower(problem, x, y0)
    except RuntimeError as unsolved:
        notes.error("bounds", first_line(unsolved), "make lower strongly convex in y.")
        return
    active, weak, near = (int(found) for found in _counted(problem, x, y))
    notes.numbers["active_bounds"] = active
    notes.numbers["strictly_complementary"] = not weak + near
    entries = total_size(problem.lower_set.single(y))
    words = f"{count(active, 'bound')} of {entries} entries of y*(x0) active"
    if active == entries:
        words += ": y* moves with x only as the bounds do"
    if not weak + near:
        notes.ok("bounds", f"{words}, with multipliers that are not 0.")
        return
    notes.warning(
        "bounds",
        f"{words}; {weak} of them with a multiplier of about 0, and {count(near, 'free entry')} "
        "about at a bound: F has a kink here, and its hypergradient is the slope on one side of "
        "it.",
        "nothing, where only x0 is such a point. Where solutions are, steps go to and fro across "
        "the kink: take shorter ones, and do not expect stationarity to fall to 0.",
    )


@eqx.filter_jit
def _counted(problem: Bilevel, x: PyTree, y: PyTree) -> tuple[Array, Array, Array]:
    """The active bounds, those without a multiplier, and the free entries about at a bound."""
    batch = draw(problem.lower_samples, jax.random.key(0))
    lower_set = problem.lower_set.at(x)
    slope = lower_set.riesz(jax.grad(problem.lower, argnums=1)(x, y, batch))
    step = 1 / largest_curvature(problem, x, y, batch)
    landed, met = lower_set.land(optax.tree.add_scale(y, -step, slope))
    slope, y, landed = (lower_set.single(point) for point in (slope, y, landed))
    flat_y = ravel_pytree(y)[0]
    little = _ZERO * jnp.maximum(jnp.max(jnp.abs(flat_y)), step * optax.tree.norm(slope))
    ones = optax.tree.scale(little, optax.tree.ones_like(y))
    sides, low, high = (
        ravel_pytree(lower_set.sides(point, push))[0]
        for point, push in (
            (landed, met),
            (y, ones),
            (y, optax.tree.scale(-1.0, ones)),
        )
    )
    # Parts of a product without bounds have no marks. Their multipliers are 0, and are left out.
    marked = _marked(lower_set, met)
    fixed = (low == -1) & (high == -1)  # equal bounds hold whatever the multiplier
    active = sides != 0
    weak = active & ~fixed & (jnp.abs(marked) <= little)
    near = ~active & ((low == -1) | (high == 1))
    return jnp.sum(active), jnp.sum(weak), jnp.sum(near)


def _marked(lower_set: AbstractSet, tree: PyTree) -> Array:
    """The entries of a point for which the set has marks."""
    ones = jax.tree.map(lambda leaf: jnp.ones(np.shape(leaf)), tree)
    marks = lower_set.sides(tree, ones)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(marks)}
    kept = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if path in paths]
    return ravel_pytree(kept)[0]
