"""How x moves without a server: every client its own, corrected by what neighbours tell.

A plain step is exact diffusion (Yuan, Ying, Zhao and Sayed 2019), with V the mixing matrix:

    x_hat = x - alpha (d - s),   x <- V x_hat,   s <- s + (x - x_hat) / alpha

An optimiser of Optax is given a tracked gradient. Each client sends x and d - s, and moves after
it has heard its neighbours:

    t = V (d - s),   s <- d - t,   x <- V x + optimiser(t)

Both keep sum s = 0, and rest where all x agree and the mean of d is 0. Every client runs the
optimiser by itself, on its own row. `aipod.paced_adam()` wants sums over clients besides, what a
move promised and delivered: they are tracked in the same way, as means.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, cast_like, inner
from aipod.problem import Bilevel, client_values
from aipod.slots._cost import Cost
from aipod.slots._promise import Promise, slopes_along
from aipod.slots._turn import Turn
from aipod.slots.upper._paced import PacedTransformation
from aipod.slots.upper._seen import (
    UpperState,
    by_difference,
    by_direction,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize

# Those of a `Promise`, tracked for `paced_adam`.
_NUMBERS = len(Promise._fields)


def _paced(optimizer: Any) -> bool:
    return isinstance(optimizer, PacedTransformation)


def first_alone(
    problem: Bilevel, optimizer: optax.GradientTransformation | None, x: PyTree
) -> UpperState:
    """The state of the upper level before the first step, with a row for each client."""
    seen, zero = nothing_seen(problem, x), optax.tree.zeros_like(x)
    if optimizer is None:
        return UpperState(None, seen, correction=zero)
    own = jax.vmap(optimizer.init)(x)
    if not _paced(optimizer):
        return UpperState(own, seen, correction=zero)
    none = jnp.zeros((*problem.upper_set.apart, _NUMBERS), jnp.result_type(*jax.tree.leaves(x)))
    return UpperState(own, seen, correction=(zero, none))


def next_alone(
    turn: Turn,
    lr: StepSize | None,
    optimizer: optax.GradientTransformation | None,
    corrected: bool,
    slope: PyTree,
    implicit: PyTree,
    batch: Any,
    state: UpperState,
) -> tuple[PyTree, UpperState, Cost]:
    """x, the state and the cost after one exchange."""
    x, upper_set = turn.x, turn.problem.upper_set.for_round(turn.round_key)
    slope, cost = cast_like(slope, x), turn.upper_cost(1)
    if optimizer is not None:
        new, own, along, correction = _tracked(turn, optimizer, slope, implicit, batch, state)
        seen = by_optimizer(state.seen, turn.problem.upper_set, along, x, new)
        cost = Cost(1, rounds=1, sent_x=2)
        return new, UpperState(own, seen, correction=correction), cost
    rate = turn.lr(lr)
    if not corrected:
        new = cast_like(upper_set.project(axpy(x, -rate, slope)), x)
        seen = by_direction(state.seen, slope, rate)
        return new, UpperState(None, seen, correction=state.correction), cost
    left = optax.tree.sub(slope, state.correction)
    new, correction = upper_set.settle(axpy(x, -rate, left), state.correction, rate)
    new = cast_like(new, x)
    seen = by_direction(state.seen, left, rate)
    if not upper_set.affine:
        seen = by_difference(state.seen, x, new, rate)
    return new, UpperState(None, seen, correction=correction), cost


def _tracked(
    turn: Turn,
    optimizer: optax.GradientTransformation,
    slope: PyTree,
    implicit: PyTree,
    batch: Any,
    state: UpperState,
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """x, the optimiser's state, the tracked gradient and s."""
    x, upper_set = turn.x, turn.problem.upper_set.for_round(turn.round_key)
    update: Any = optimizer.update
    if not _paced(optimizer):
        along, correction = upper_set.track(slope, state.correction)
        change, own = jax.vmap(update)(along, state.own, x)
    else:
        numbers = _numbers(turn, implicit, batch).astype(state.correction[1].dtype)
        (along, tracked), correction = upper_set.track((slope, numbers), state.correction)
        moves: Any = turn.moves

        def paced(g: PyTree, own: PyTree, x: PyTree, moved: PyTree, n: Array, more: Array) -> Any:
            told = Promise(*n)._asdict()
            return update(g, own, x, moved=moved, stiffer=more, **told)

        stiffer = jnp.broadcast_to(turn.rates.stiffer, turn.problem.upper_set.apart)
        change, own = jax.vmap(paced)(along, state.own, x, moves[0], tracked, stiffer)
    own = jax.tree.map(lambda a, b: a.astype(b.dtype), own, state.own)
    new = optax.tree.add(upper_set.project(x), change)
    return cast_like(new, x), own, along, correction


def _numbers(turn: Turn, implicit: PyTree | None, batch: Any) -> Array:
    """What `Turn.promise` gives, of each client by itself."""
    moves: Any = turn.moves
    moved_x, moved_y, before = moves
    problem, x = turn.problem, turn.x

    def dot(a: PyTree, b: PyTree) -> Array:
        return inner(a, b, per_client=True)

    def along(y: PyTree) -> Array:
        return dot(jax.grad(problem.upper, argnums=1)(x, y, batch), moved_y)

    direct = dot(jax.grad(problem.upper)(x, before, batch), moved_x)
    promised = direct if implicit is None else direct + dot(implicit, moved_x)
    rises = (promised, *(direct + one for one in slopes_along(problem, before, moved_y, along)))
    value = client_values(problem.upper, x, before, batch)
    if value is None:
        value = jnp.zeros_like(direct)
    return jnp.stack([*(-rise for rise in rises), value], axis=-1)
