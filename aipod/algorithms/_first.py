"""The state before the first outer step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.algorithms._keeping import Keeping, spread
from aipod.algorithms._state import State
from aipod.problem import Bilevel
from aipod.sets import AbstractSet


def _agreed(tree: PyTree, constraint: AbstractSet) -> PyTree:
    """One row for all clients: the average; exactly the first row where all are equal."""

    def one(leaf: Array, average: Array) -> Array:
        return jnp.where(jnp.all(leaf == leaf[:1]), leaf[:1], average[:1])

    # A set within which clients agree may move with x; the first step projects on it.
    mean = (constraint.agreement or constraint).project(tree)
    return jax.tree.map(one, tree, mean)


def _first_state(solver: Any, keeping: Keeping, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
    """The state before the first step as it is kept; x0 and y0 may have one row for all clients."""

    def rows(tree: PyTree, constraint: AbstractSet, *, once: bool) -> PyTree:
        several = jax.tree.leaves(tree)[0].shape[0] > 1
        if once and several:
            tree = _agreed(tree, constraint)
        return tree if once else spread(tree, keeping.clients)

    inside = keeping.everyone().problem(problem, None)
    x = rows(x0, problem.upper_set, once=keeping.once[0])
    common = solver.lower.common(problem)
    y = spread(rows(y0, problem.lower_set, once=common), keeping.clients)
    x = x if keeping.single else spread(x, keeping.clients)
    return keeping.kept(solver.initial(inside, x, y))


# Compiled as one program: a dozen small operations one by one would cost seconds.
@eqx.filter_jit
def compiled_initial(solver: Any, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
    if count := problem.lower_set.apart:
        # A point may be given once for all clients.
        x0, y0 = spread(x0, *count), spread(y0, *count)
    state: State = solver.initial(problem, x0, y0)
    return state


@eqx.filter_jit
def compiled_first(
    solver: Any, keeping: Keeping, problem: Bilevel, x0: PyTree, y0: PyTree
) -> State:
    return _first_state(solver, keeping, problem, x0, y0)
