"""What a run sees of its own convergence, from the hypergradients that it computes anyway."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.tree import inner
from aipod.algorithms._sums import Sums
from aipod.problem import Bilevel, is_noisy
from aipod.sets import AbstractSet
from aipod.slots.adjoint import Health
from aipod.slots.upper import Seen

# A window is a tenth of the steps before it, and at least so long; it has so many blocks.
_SHORTEST = 8
_BLOCKS = 8
# F still decreases in a window that made at least this share of the whole predicted decrease.
_PROGRESS = 1e-4
# y is followed in a window that moves it, consistently, by at most this share of its whole way.
_FOLLOWED = 0.5
# The same for one block.
_CALM = 0.5


class Watch(eqx.Module):
    """What is kept from one outer step to the next.

    Numbers about x and y are one for each client where a set has clients: no sum crosses them.

    - `window_x`, `window_y`, `block_y`: x and y when the running window and block began.
    - `began`, `block_began`: the steps at which they did.
    - `path`: the sum of the step sizes since the window began.
    - `unit`: the largest |h| so far.
    - `now`, `before`: the sums of the running window, and of the one before it.
    - `size`: |h|^2 of the last step, in units.
    - `start`: the largest |grad F|^2 while y was followed, in units: without noise of a step, else
        of a window and less several standard errors.
    - `decrease`: the predicted decrease of F so far, in units.
    - `way`: how far y has gone, window by window.
    - `length`: |y|^2 when the last block ended.
    - `top`: the largest |grad F|^2 of any window, in units.
    - `adjoint`: the mean of `right` in the window of `start`.
    - `reach`: the largest mean of `distance` in a window.
    - `bent`: whether the lower level was seen to bend down.
    - `improved`: the last step at the end of a window in which F still decreased.
    - `curvature`: the estimate of the curvature when the last window ended.
    - `noisy`: whether the problem has noise.
    """

    window_x: PyTree
    window_y: PyTree
    block_y: PyTree
    began: Array
    block_began: Array
    path: Array
    unit: Array
    now: Sums
    before: Sums
    size: Array
    start: Array
    decrease: Array
    way: Array
    length: Array
    top: Array
    adjoint: Array
    reach: Array
    bent: Array
    improved: Array
    curvature: Array
    noisy: Array


class Outcome(eqx.Module):
    """What an outer step shows to the watch.

    - `x`, `new_x`, `y`: x before and after it, and y after it.
    - `before`, `seen`: what the upper slot saw in the step before and in this one.
    - `health`: of the adjoint.
    - `curvature`: the estimate that the step used.
    """

    x: PyTree
    new_x: PyTree
    y: PyTree
    before: Seen | None
    seen: Seen | None
    health: Health | None
    curvature: Array | None


def natural_way(way: Any, length: Any) -> Any:
    """What moves of y are measured against: its way, unless it began too far away.

    Then most of the way says nothing about the problem, and the size of y is used.
    """
    return jnp.minimum(way, jnp.maximum(3 * jnp.sqrt(length), way / 100))


def first_watch(problem: Bilevel, x: PyTree, y: PyTree, seen: Seen | None) -> Watch:
    """Before the first step."""
    none = jnp.zeros((), jnp.int32)
    of_x = jnp.zeros(()) if seen is None else jnp.zeros_like(seen.rate)
    of_y = jnp.zeros_like(inner(y, y, per_client=problem.lower_set.per_client))
    sums = Sums.zero(of_x, of_y)
    return Watch(
        window_x=None if seen is None else x,
        window_y=y,
        block_y=y,
        began=none,
        block_began=none,
        path=of_x,
        unit=of_x,
        now=sums,
        before=sums,
        size=of_x,
        start=of_x,
        decrease=of_x,
        way=of_y,
        length=of_y,
        top=of_x,
        adjoint=of_y,
        reach=of_x,
        bent=jnp.zeros(of_y.shape, bool),
        improved=of_x.astype(jnp.int32),
        curvature=jnp.zeros(()),
        noisy=jnp.asarray(False),
    )


def block_ends(watch_began: Array, block_began: Array, step: Array) -> tuple[Array, Array]:
    """Whether the running block, and the window, end with outer step `step`, counted from 0.

    A window that began at step b has max(8, b // 10) steps, and a block an eighth of them. Written
    without divisions, each of which would be a program of its own in the compiled step.
    """
    # One less than the steps made.
    since, since_block = step - watch_began, step - block_began
    closes = (since >= _SHORTEST - 1) & (10 * (since + 2) > watch_began)
    full = (since_block >= 0) & (10 * _BLOCKS * (since_block + 2) > watch_began)
    return closes | full, closes


def at_block_end(
    watch: Watch, problem: Bilevel, step: Array, outcome: Outcome, closes: Array
) -> Watch:
    """With the moves of y in a block that has ended, and the window closed where `closes`."""
    y = outcome.y

    def dot(a: PyTree, b: PyTree) -> Array:
        return inner(a, b, per_client=problem.lower_set.per_client)

    last = jax.tree.map(jnp.subtract, y, watch.block_y)
    earlier = jax.tree.map(jnp.subtract, watch.block_y, watch.window_y)
    noisy = is_noisy(problem)
    drift, moves = dot(earlier, last), dot(last, last)
    if not noisy:
        # Without noise one hypergradient is enough, once y no longer jumps.
        here: Any = jax.tree.map(jnp.subtract, y, watch.window_y)
        way = natural_way(watch.way + jnp.sqrt(dot(here, here)), dot(y, y))
        calm = _alike(moves <= (_CALM * way) ** 2, watch.start, problem.lower_set, y)
        watch = _started(watch, calm, watch.size)
    watch = dataclasses.replace(
        watch,
        now=watch.now.plus(drift=drift, moves=moves),
        block_y=y,
        block_began=step + 1,
        length=dot(y, y),
        noisy=jnp.asarray(noisy),
    )
    return _closed(watch, outcome, step, closes, problem.lower_set, noisy=noisy)


def _closed(
    watch: Watch,
    outcome: Outcome,
    step: Array,
    closes: Array,
    lower_set: AbstractSet,
    *,
    noisy: bool,
) -> Watch:
    """With the running window closed, where it is long enough."""
    running = watch
    now, count = watch.now, jnp.maximum(watch.now.steps, 1.0)
    descends = now.decrease > _PROGRESS * watch.decrease
    way = watch.way + jnp.sqrt(jnp.maximum(now.moves + 2 * now.drift, 0.0))
    value = now.square / count
    if noisy:
        value, error = now.descent(watch.unit)
        # Three errors, because the largest of many windows is taken; and a short one is worse.
        sure = value - 3 * (1 + _SHORTEST / count) * error
        followed = now.drifted() <= (_FOLLOWED * natural_way(way, watch.length)) ** 2
        watch = _started(watch, _alike(followed, value, lower_set, outcome.y), sure)
        descends = descends & (value > 2 * error)
    curvature = watch.curvature
    if outcome.curvature is not None:
        curvature = outcome.curvature.astype(curvature.dtype)
    closed = dataclasses.replace(
        watch,
        window_x=None if watch.window_x is None else outcome.new_x,
        window_y=outcome.y,
        began=step + 1,
        path=jnp.zeros_like(watch.path),
        now=jax.tree.map(jnp.zeros_like, now),
        before=now,
        top=jnp.maximum(watch.top, value),
        way=way,
        reach=jnp.maximum(watch.reach, now.distance / count),
        improved=jnp.where(descends, step + 1, watch.improved),
        curvature=curvature,
    )
    return jax.tree.map(lambda a, b: jnp.where(closes, a, b), closed, running)


def _started(watch: Watch, sound: Array, value: Array) -> Watch:
    """With a larger `start`, where the value is one and was measured under sound conditions."""
    larger = sound & (value > watch.start)
    right = watch.now.right / jnp.maximum(watch.now.steps, 1.0)
    # One number for all clients, where x is kept once.
    alike = larger if larger.shape == right.shape else jnp.ravel(larger)[0]
    return dataclasses.replace(
        watch,
        start=jnp.where(larger, value, watch.start),
        adjoint=jnp.where(alike, right, watch.adjoint),
    )


def _alike(truth: Array, like: Array, lower_set: AbstractSet, y: PyTree) -> Array:
    """`truth` where numbers about x and y are of one shape; else whether it holds for all."""
    if truth.shape == like.shape:
        return truth
    if jax.tree.leaves(y)[0].shape[0] == 1:
        # All clients have the same y, and so the same answer.
        return jnp.broadcast_to(truth[0], like.shape)
    return lower_set.largest(jnp.where(truth, 0.0, 1.0)) <= 0
