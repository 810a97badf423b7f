"""The two simplest adjoints: zero, and a dense solve."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod.problem import Bilevel, draw, grad_y_upper
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health, health_of, healthy
from aipod.stepsize import check_not_negative


class Zero(AbstractAdjoint):
    """z = 0, for methods that ignore how y depends on x.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Zero())  # grad_x f alone
        ```
    """

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return healthy(y, problem.lower_set)

    def health(self, state: PyTree) -> Health | None:
        return state

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        state = health_of(turn.y, turn.problem.lower_set, 1.0, 1.0, False)
        return optax.tree.zeros_like(turn.y), state, Cost()


class Direct(AbstractAdjoint):
    """A dense solve with the Hessian of one sample: exact, and only for small problems.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Direct())
        ```
    """

    damping: float = 0.0

    def __check_init__(self) -> None:
        check_not_negative(self.damping, "damping")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return healthy(y, problem.lower_set)

    def health(self, state: PyTree) -> Health | None:
        return state

    def failed(self, state: PyTree) -> Array | None:
        return jnp.any(state.left > 0)

    def failure(self, state: PyTree) -> str:
        return (
            "the Hessian of the lower level is singular along the set: add a term such as "
            "0.5 * mu * sum(y**2) to the lower objective, or set Direct(damping=...)."
        )

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y = turn.problem, turn.x, turn.y
        batch = draw(problem.lower_samples, turn.key)
        flat, restore = ravel_pytree(y)
        identity = jnp.eye(flat.size, dtype=flat.dtype)

        def project(v: Array) -> Array:
            return ravel_pytree(problem.lower_set.tangent(restore(v)))[0]

        basis = jax.vmap(project, out_axes=1)(identity)
        hessian = jax.hessian(lambda t: problem.lower(x, restore(t), batch))(flat)
        hessian = hessian + self.damping * identity
        off = identity - basis
        # Something positive off Ker A makes the matrix regular; the projected right-hand side has
        # no part there, so the solution does not change.
        matrix = basis.T @ hessian @ basis + off.T @ off
        gradient = ravel_pytree(grad_y_upper(problem, x, y, upper_batch))[0]
        right = basis.T @ gradient
        z = basis @ jnp.linalg.solve(matrix, right)
        # z' G z = z' right; a singular matrix gives infinities, which solve nothing.
        solved = jnp.all(jnp.isfinite(z))
        size = right @ right
        left = jnp.where(solved, 0.0, size)
        state = health_of(turn.y, problem.lower_set, left, size, z @ right < 0)
        return restore(z), state, turn.lower_cost(flat.size + 1, lower_draws=1)
