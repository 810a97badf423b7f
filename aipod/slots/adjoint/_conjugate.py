"""Conjugate gradients on the projected Hessian."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import cast_like, rounding
from aipod.problem import Bilevel, draw, grad_y_upper
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy
from aipod.slots.adjoint._iterate import conjugate_gradients
from aipod.stepsize import check_not_negative, check_steps

# A relative residual that no tolerance asks for.
_STALLED = 1e-2


class ConjugateGradient(AbstractAdjoint):
    """Conjugate gradients on P G P, on one sample of G.

    **Arguments:**

    - `rtol`, `atol`: when to stop.
    - `max_steps`: at most so many products with G; default ten for each unknown.
    - `damping`: a Tikhonov term, G + damping I.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.ConjugateGradient(rtol=1e-12))
        ```
    """

    rtol: float = 1e-6
    atol: float = 0.0
    max_steps: int | None = eqx.field(static=True, default=None)
    damping: float = 0.0

    def __check_init__(self) -> None:
        for name in ("rtol", "atol"):
            check_not_negative(getattr(self, name), f"ConjugateGradient: {name}, as rtol and atol")
        if self.max_steps is not None:
            check_steps(self.max_steps, "ConjugateGradient: max_steps")
        check_not_negative(self.damping, "damping")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return healthy(y, problem.lower_set)

    def health(self, state: PyTree) -> Health | None:
        return state

    def failed(self, state: PyTree) -> Array | None:
        return jnp.any(state.bent) | jnp.any(state.left > self._most**2 * state.right)

    @property
    def _most(self) -> float:
        """The relative residual above which the iteration has failed, not only stopped early."""
        return math.inf if self.max_steps is not None else max(_STALLED, 100 * self.rtol)

    def failure(self, state: PyTree) -> str:
        if bool(jnp.any(state.bent)):
            return (
                "conjugate gradients met a direction in which the lower level does not bend up: it "
                "is not strongly convex in y there. Add a term such as 0.5 * mu * sum(y**2) to the "
                "lower objective, set ConjugateGradient(damping=...), or use aipod.Direct(), which "
                "needs no convexity."
            )
        left = float(jnp.sqrt(jnp.max(state.left / state.right)))
        return (
            f"conjugate gradients stalled at a relative residual of {left:.2g}, where "
            f"{float(self.rtol):.2g} was asked for: the lower level is too ill-conditioned for the "
            "precision. Use float64 (jax.config.update('jax_enable_x64', True)), or set "
            "ConjugateGradient(damping=...)."
        )

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y = turn.problem, turn.x, turn.y
        batch = draw(problem.lower_samples, turn.key)
        gradient = grad_y_upper(problem, x, y, upper_batch)
        found = solve_projected(
            lambda t: problem.lower(x, t, batch),
            problem,
            y,
            gradient,
            rtol=self.rtol,
            atol=self.atol,
            max_steps=self.max_steps,
            damping=self.damping,
        )
        right = found.right**2
        left = found.left**2 * right
        state = health_of(y, problem.lower_set, left, right, found.curvature <= 0)
        return found.value, state, turn.lower_cost(2 * found.steps + 2, lower_draws=1)


class Solved(NamedTuple):
    """How `solve_projected` ended.

    - `value`: z.
    - `steps`: products with G.
    - `left`: the norm of the residual, relative to the right-hand side.
    - `right`: the norm of the right-hand side.
    - `curvature`: the smallest curvature of G that was met, in units of the one along the
        right-hand side; not positive where the lower level is not convex along Ker A.
    """

    value: PyTree
    steps: Array
    left: Array
    right: Array
    curvature: Array


def solve_projected(
    objective: Callable[[PyTree], Array],
    problem: Bilevel,
    y: PyTree,
    gradient: PyTree,
    *,
    rtol: float,
    atol: float,
    max_steps: int | None,
    damping: float = 0.0,
) -> Solved:
    """z in Ker A with P' G z = P' gradient, G the Hessian of `objective` at y."""
    lower_set = problem.lower_set
    hessian = jax.linearize(jax.grad(objective), y)[1]
    right = lower_set.cotangent(gradient)
    along = cast_like(lower_set.tangent(right), y)
    size = optax.tree.norm(right)
    # With the right-hand side and the curvature along it scaled to 1, single precision neither
    # overflows nor vanishes, and a tolerance means the same for every problem.
    curvature = jnp.abs(optax.tree.vdot(along, hessian(along))) + damping * size**2
    scale = jnp.where(curvature > 0, curvature / jnp.where(size > 0, size, 1.0) ** 2, 1.0)

    def matvec(v: PyTree) -> PyTree:
        inside = cast_like(lower_set.tangent(v), y)
        outside = optax.tree.sub(v, inside)
        product = optax.tree.add_scale(hessian(inside), damping, inside)
        # The identity off Ker A keeps the operator regular where rounding errors leave Ker A;
        # otherwise a converged iteration would meet directions of zero curvature.
        return optax.tree.add(
            optax.tree.scale(1 / scale, lower_set.cotangent(product)),
            optax.tree.sub(outside, lower_set.cotangent(outside)),
        )

    unit = jnp.where(size > 0, size, 1.0)
    floor = 50 * rounding(y)
    if max_steps is None:
        max_steps = 10 * sum(leaf.size for leaf in jax.tree.leaves(y))
    found = conjugate_gradients(
        matvec,
        # Leaves of y may have several types.
        cast_like(optax.tree.scale(1 / unit, right), y),
        tolerance=jnp.maximum(jnp.maximum(rtol, atol / unit), floor),
        max_steps=min(max_steps, 2**31 - 1),
    )
    z = optax.tree.scale(unit / scale, lower_set.tangent(found.value))
    return Solved(cast_like(z, y), found.steps, found.residual, size, found.curvature)
