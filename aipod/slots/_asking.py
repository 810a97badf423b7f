"""The derivatives that slots ask for in their loops, estimated where the solver has an estimator.

Each is a function of a key and a memory besides its point, and returns the next memory. Without an
estimator the memory is None, and the derivative is that on a fresh batch.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PRNGKeyArray, PyTree

from aipod.problem import draw, grad_y_upper, hessian_product
from aipod.slots._oracles import Memories
from aipod.slots._turn import Turn

Asked = tuple[PyTree, Memories | None]


def lower_oracle(turn: Turn, draws: int = 1) -> Callable[..., Asked]:
    """(y, key, memory) -> grad_y g(x, y) as a direction of the lower set, and the next memory."""
    if turn.memory is None:
        plain = turn.lower_gradient(draws)
        return lambda y, key, memory: (plain(y, key), memory)
    problem = turn.problem
    gradient = jax.grad(problem.lower, argnums=1)

    def raw(point: PyTree, batch: Any) -> PyTree:
        return gradient(*point, batch)

    def oracle(y: PyTree, key: PRNGKeyArray, memory: Memories | None) -> Asked:
        point, samples = (turn.x, y), problem.lower_samples
        value, memory = turn.asked("gradient", raw, point, samples, key, memory)
        return problem.lower_set.riesz(value), memory

    return oracle


def hessian_oracle(turn: Turn, draws: int = 1) -> Callable[..., Asked]:
    """(v, key, memory) -> grad_yy g(x, y) v as a direction of the lower set, and the memory."""
    if turn.memory is None:
        plain = turn.hessian_product(draws)
        return lambda v, key, memory: (plain(v, key), memory)
    problem = turn.problem

    def raw(point: PyTree, batch: Any) -> PyTree:
        x, y, v = point
        return hessian_product(lambda y: problem.lower(x, y, batch), y, v)

    def oracle(v: PyTree, key: PRNGKeyArray, memory: Memories | None) -> Asked:
        point, samples = (turn.x, turn.y, v), problem.lower_samples
        value, memory = turn.asked("product", raw, point, samples, key, memory)
        return problem.lower_set.riesz(value), memory

    return oracle


def slope_oracle(turn: Turn, draws: int = 1) -> Callable[..., Asked]:
    """(key, memory) -> grad_y f(x, y) as a direction of the lower set, and the next memory."""
    problem = turn.problem
    riesz = problem.lower_set.riesz
    if turn.memory is None:
        upper, samples = problem.upper_at(turn.x, draws)
        slope = jax.grad(upper)
        return lambda key, memory: (riesz(slope(turn.y, draw(samples, key))), memory)

    def raw(point: PyTree, batch: Any) -> PyTree:
        x, y = point
        return grad_y_upper(problem, x, y, batch)

    def oracle(key: PRNGKeyArray, memory: Memories | None) -> Asked:
        point = (turn.x, turn.y)
        value, memory = turn.asked("slope", raw, point, problem.upper_samples, key, memory)
        return riesz(value), memory

    return oracle
