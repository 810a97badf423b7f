"""The quadratic 1/2 u' G u + u' grad_y f over Ker A, whose minimiser is u = -z.

Both ProxSkip adjoints, that of E2-AiPOD and that of E3-AiPOD, descend on it.
"""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy
from aipod.problem import is_random
from aipod.slots._asking import hessian_oracle, slope_oracle
from aipod.slots._turn import Turn

Parts = Callable[[PyTree, PRNGKeyArray, Any], tuple[PyTree, PyTree, Any]]


def quadratic_parts(turn: Turn, draws: int) -> tuple[Parts, Any]:
    """(u, key, memory) -> grad_y f and G u on fresh samples, as directions, and the memory.

    Also the memory to begin with. grad_y f is found once where the slots share draws (for the
    sample which x sees), and where f has no random batches.
    """
    slope_of, hessian = slope_oracle(turn, draws), hessian_oracle(turn, draws)
    memory, common = turn.memory, None
    fixed = memory is None and not is_random(turn.problem.upper_samples)
    if turn.shares_draws or fixed:
        common, memory = slope_of(turn.sample_keys[0], memory)

    def parts(u: PyTree, key: PRNGKeyArray, memory: Any) -> tuple[PyTree, PyTree, Any]:
        upper_key, lower_key = subkeys(key, 2)
        slope = common
        if slope is None:
            slope, memory = slope_of(upper_key, memory)
        product, memory = hessian(u, lower_key, memory)
        return slope, product, memory

    return parts, memory


def damped(u: PyTree, slope: PyTree, product: PyTree, damping: Array | float) -> PyTree:
    """grad_y f + (G + damping I) u, the gradient of the quadratic."""
    return axpy(optax.tree.add(slope, product), damping, u)
