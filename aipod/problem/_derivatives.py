"""The derivatives that algorithms take of a problem, by products alone.

With z from the adjoint and L = d anchor / dx = -A^+ grad h (`eq.y_grad`),

    grad F(x) = grad_x f  -  grad_xy g z  +  L' (grad_y f - grad_yy g z)

Everything after grad_x f is one reverse-mode derivative, `implicit_term`: no Hessian, no Jacobian
and no basis is formed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.problem._bilevel import Bilevel


def grad_x_upper(
    problem: Bilevel, x: PyTree, y: PyTree, batch: Any, *, follow: bool = False
) -> PyTree:
    """grad_x f(x, y; batch), y held fixed; with `follow`, y moves as the lower set does."""
    if not (follow and problem.lower_set.coupled):
        return jax.grad(problem.upper)(x, y, batch)
    return jax.grad(lambda m: problem.upper(m, problem.lower_set.follow(y, m), batch))(x)


def grad_y_upper(problem: Bilevel, x: PyTree, y: PyTree, batch: Any) -> PyTree:
    """grad_y f(x, y; batch), x held fixed."""
    return jax.grad(problem.upper, argnums=1)(x, y, batch)


def hessian_product(
    objective: Callable[[PyTree], Array], y: PyTree, v: PyTree, damping: float = 0.0
) -> PyTree:
    """(grad_yy objective(y) + damping I) v, without forming a Hessian."""
    product = jax.jvp(jax.grad(objective), (y,), (v,))[1]
    return optax.tree.add_scale(product, damping, v) if damping else product


def implicit_term(
    problem: Bilevel,
    x: PyTree,
    y: PyTree,
    z: PyTree,
    upper_batch: Any,
    lower_batch: Any,
    *,
    with_upper: bool = True,
) -> PyTree:
    """w = -grad_xy g z + L' (grad_y f - grad_yy g z), the part of grad F that comes through y.

    The derivative of f(., y(x)) - <grad_y g(x, y(x)), z> with y(x) moving as the set does. Not
    `with_upper`, the part of f is left out.
    """

    def along_z(moving: PyTree, followed: PyTree) -> Array:
        # Reverse mode twice, not reverse over forward: objectives with a custom_vjp have no jvp.
        return optax.tree.vdot(jax.grad(problem.lower, argnums=1)(moving, followed, lower_batch), z)

    def phi(moving: PyTree) -> Array:
        followed = problem.lower_set.follow(y, moving)
        return problem.upper(x, followed, upper_batch) - along_z(moving, followed)

    if with_upper and problem.lower_set.coupled:
        return jax.grad(phi)(x)
    # The sign at the end, where it costs nothing: before, it would be a pass over z.
    part = jax.grad(lambda moving: along_z(moving, problem.lower_set.follow(y, moving)))(x)
    return jax.tree.map(jnp.negative, part)
