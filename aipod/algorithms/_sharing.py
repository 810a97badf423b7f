"""Which parts of a state all clients have alike when an outer step is over."""

from typing import Any

import jax
from jaxtyping import PyTree

from aipod.algorithms._state import State
from aipod.problem import Bilevel


def common_parts(solver: Any, problem: Bilevel, state: State) -> State:
    """For each leaf of a state whether it is the same for all clients after an outer step.

    Some of these leaves have no client axis.
    """
    upper = solver.upper.common(state.upper)
    x, y = upper is not None, solver.lower.common(problem)

    def marked(tree: PyTree, mark: bool) -> Any:
        return jax.tree.map(lambda _: mark, tree)

    moves = state.moves
    return State(
        x=marked(state.x, x),
        y=marked(state.y, y),
        lower=marked(state.lower, False),
        adjoint=solver.adjoint.common(state.adjoint),
        upper=marked(state.upper, False) if upper is None else upper,
        curvature=marked(state.curvature, False),
        step=marked(state.step, False),
        counts=marked(state.counts, False),
        watch=state.watch.common(x=x, y=y),
        moves=None if moves is None else (marked(moves[0], x), marked(moves[1], y)),
        estimates=marked(state.estimates, False),
    )


def has_cohorts(solver: Any, problem: Bilevel, state: State) -> bool:
    """Whether an outer step is made by some of the clients, while the others do nothing.

    They can only pause where they find what they need in what all clients share.
    """
    if not solver.lower.common(problem) or solver.upper.common(state.upper) is None:
        return False
    one_round = solver.lower.deferred and solver.adjoint.deferred
    return problem.divisible and (one_round or problem.lower_set.cohorts)
