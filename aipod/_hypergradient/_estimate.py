"""The hypergradient at any (x, y), with any adjoint."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._hypergradient._face import at_face
from aipod._misc.functions import keep
from aipod._misc.keys import as_key, subkeys
from aipod._misc.tree import as_arrays, is_concrete
from aipod.problem import Bilevel, draw, grad_x_upper, implicit_term
from aipod.slots._turn import Turn
from aipod.slots.adjoint import AbstractAdjoint, ConjugateGradient
from aipod.stepsize import Rates, curvature_init, curvature_iterations, curvature_update


def hypergradient(
    problem: Bilevel,
    x: PyTree,
    y: PyTree,
    adjoint: AbstractAdjoint = ConjugateGradient(),
    *,
    key: PRNGKeyArray | None = None,
) -> PyTree:
    """grad F at x, as it is when y solves the lower level (`eq.F_grad`, `eq.y_grad`).

    Where the lower set has bounds, those that are active at y stay so: y*(x) moves on a face. F is
    then smooth only piece by piece. At a y with an active bound whose multiplier is 0 the result is
    a derivative along one of the pieces.

    An adjoint that breaks down, such as conjugate gradients where the lower level bends down,
    raises `RuntimeError`; inside jit, where nothing can be raised, the result is NaN.

    **Arguments:**

    - `problem`, `x`, `y`: where; for grad F itself y must be `exact_lower(problem, x)`.
    - `adjoint`: how z is found.
    - `key`: draws batches from the problem's samplers; without it the expectations are used.

    !!! example
        ```python
        y = aipod.exact_lower(problem, x)
        gradient = aipod.hypergradient(problem, x, y, adjoint=aipod.Direct())
        ```
    """
    check_problem(problem)
    if not isinstance(adjoint, AbstractAdjoint):
        raise ValueError(
            "adjoint must be a slot such as aipod.ConjugateGradient() or aipod.Neumann(50), got "
            f"{type(adjoint).__name__}."
        )
    key = None if key is None else as_key(key)
    if key is None:
        problem, key = problem.expected(), jax.random.key(0)
    x, y = keep(x), keep(y)
    if is_concrete((x, y)):
        problem.check(x, y)
    found, state = _hypergradient(problem, as_arrays(x), as_arrays(y), adjoint, key)
    failed = adjoint.failed(state)
    if failed is None:
        return found
    if is_concrete(failed):
        if bool(failed):
            raise RuntimeError(adjoint.failure(state))
        return found
    return jax.tree.map(lambda leaf: jnp.where(failed, np.nan, leaf), found)


def check_problem(problem: Any) -> None:
    """Raises `ValueError` unless problem is one."""
    if not isinstance(problem, Bilevel):
        raise ValueError(f"problem must be an aipod.Bilevel, got {type(problem).__name__}.")


@eqx.filter_jit
def _hypergradient(
    problem: Bilevel, x: PyTree, y: PyTree, adjoint: AbstractAdjoint, key: PRNGKeyArray
) -> tuple[PyTree, PyTree]:
    upper_key, lower_key, adjoint_key, curvature_key = subkeys(key, 4)
    upper_batch = draw(problem.upper_samples, upper_key)
    lower_batch = draw(problem.lower_samples, lower_key)
    step, curvature = jnp.zeros((), int), None
    if iterations := curvature_iterations(adjoint.lr):
        start = curvature_init(y, problem.lower_set)
        _, curvature = curvature_update(problem, x, y, start, step, iterations, key=curvature_key)
    problem = at_face(problem, x, y, lower_batch)
    turn = Turn(problem, x, y, Rates(step, curvature), adjoint_key)
    z, state, _ = adjoint.solve(turn, upper_batch, adjoint.init(problem, x, y))
    implicit = implicit_term(problem, x, y, z, upper_batch, lower_batch)
    return optax.tree.add(grad_x_upper(problem, x, y, upper_batch), implicit), state
