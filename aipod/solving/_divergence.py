"""Why a run diverged: which level, and what about it."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import inner
from aipod.algorithms import Alternating, State
from aipod.problem import Bilevel, draw, hessian_product
from aipod.stepsize import Rates

# Products with the Hessian, at each of two points.
_PRODUCTS = 40
# A step times the curvature above which gradient steps on a quadratic grow.
_UNSTABLE = 2.0


def why_diverged(
    problem: Bilevel, solver: Alternating, state: State, key: PRNGKeyArray
) -> tuple[str, str]:
    """A sentence about the cause, and a remedy besides shorter steps; both empty if unknown.

    The curvature of the lower level is measured where the last window of steps began, when the
    numbers were still of a usual size, and at the last finite state.
    """
    watch = state.watch.unpacked()
    if bool(np.any(np.asarray(watch.bent))):
        return _NOT_CONVEX
    last = state.x, state.y
    # What all clients have alike is kept once.
    began: tuple[PyTree, PyTree] = jax.tree.map(
        lambda old, new: jnp.broadcast_to(old, new.shape),
        (state.x if watch.window_x is None else watch.window_x, watch.window_y),
        last,
    )
    points = [began, last]
    found = [float(_curvature(problem, *point, key)) for point in points]
    known = [value for value in found if math.isfinite(value)]
    if any(value < 0 for value in known):
        return _NOT_CONVEX
    largest = max(known, default=0.0)
    rates = Rates(state.step, None if state.curvature is None else state.curvature.estimate)
    steps = {"lower_lr": solver.lower.lr, "adjoint_lr": solver.adjoint.lr}
    used = {name: float(rates(lr)) for name, lr in steps.items() if lr is not None}
    name, longest = max(used.items(), key=lambda item: item[1], default=("", 0.0))
    if longest * largest > _UNSTABLE:
        return (
            f"The curvature of the lower level was underestimated: it is {largest:.3g}, and "
            f"{name} was {longest:.3g} where at most {1 / largest:.3g} is safe.",
            "",
        )
    if not used or not known:
        return "", ""
    return (
        f"The lower level was stable (its curvature is {largest:.3g}, {name} was {longest:.3g}): "
        "the steps on x were too long.",
        "",
    )


_NOT_CONVEX = (
    "The lower level was seen to bend down: it is not convex in y there.",
    "Add a term such as 0.5 * mu * sum(y**2) to the lower objective, or use damping=.",
)


@eqx.filter_jit
def _curvature(problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray) -> Array:
    """The curvature of the lower level that is largest in size, with its sign."""
    batch = draw(problem.lower_samples, key)

    def product(v: PyTree) -> PyTree:
        return problem.lower_set.riesz(hessian_product(lambda t: problem.lower(x, t, batch), y, v))

    def unit(v: PyTree) -> PyTree:
        size = optax.tree.norm(v)
        return optax.tree.scale(1 / jnp.where(size > 0, size, 1.0), v)

    def body(_: Any, v: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), unit(product(v)), v)

    start = unit(optax.tree.random_like(key, y, jax.random.normal))
    v = jax.lax.fori_loop(0, _PRODUCTS, body, start)
    return inner(v, product(v))
