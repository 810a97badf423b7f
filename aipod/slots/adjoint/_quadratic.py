"""The quadratic 1/2 u' G u + u' grad_y f over Ker A, whose minimiser is u = -z.

Both ProxSkip adjoints, that of E2-AiPOD and that of E3-AiPOD, descend on it.
"""

from collections.abc import Callable

import jax
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy
from aipod.problem import draw
from aipod.slots._turn import Turn

Parts = Callable[[PyTree, PRNGKeyArray], tuple[PyTree, PyTree]]


def quadratic_parts(turn: Turn, draws: int) -> Parts:
    """(u, key) -> grad_y f and G u on fresh samples, as directions of the set."""
    upper, upper_samples = turn.problem.upper_at(turn.x, draws)
    hessian = turn.hessian_product(draws)

    def parts(u: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        upper_key, lower_key = subkeys(key, 2)
        slope = jax.grad(upper)(turn.y, draw(upper_samples, upper_key))
        product = hessian(u, lower_key)
        return turn.problem.lower_set.riesz(slope), product

    return parts


def damped(u: PyTree, slope: PyTree, product: PyTree, damping: Array | float) -> PyTree:
    """grad_y f + (G + damping I) u, the gradient of the quadratic."""
    return axpy(optax.tree.add(slope, product), damping, u)
