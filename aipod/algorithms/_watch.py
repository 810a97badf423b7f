"""What a run sees of its own convergence, from the hypergradients that it computes anyway."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, inner
from aipod.algorithms._sums import Sums
from aipod.problem import Bilevel, is_random
from aipod.slots.adjoint import Health
from aipod.slots.upper import Seen

# A window is a tenth of the steps before it, and at least so long; it has so many blocks.
_SHORTEST = 8
_BLOCKS = 8
# F still decreases in a window that made at least this share of the whole predicted decrease.
_PROGRESS = 1e-4
# y is followed in a window that moves it, consistently, by at most this share of its whole way.
_FOLLOWED = 0.5


class Watch(eqx.Module):
    """What is kept from one outer step to the next.

    Numbers about x and y are one for each client where a set has clients: no sum crosses them.

    - `window_x`, `window_y`, `block_y`: x and y when the running window and block began.
    - `began`, `block_began`: the steps at which they did.
    - `path`: the sum of the step sizes since the window began.
    - `unit`: the largest |h| so far.
    - `now`, `before`: the sums of the running window, and of the one before it.
    - `size`: |h|^2 of the last step, in units.
    - `start`: the largest |grad F|^2 of a window in which y was followed, less three standard
        errors, in units.
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

    def numbers(self) -> "Watch":
        """Without x and y, which are None."""
        return dataclasses.replace(self, window_x=None, window_y=None, block_y=None)

    def with_numbers(self, numbers: "Watch") -> "Watch":
        """With the numbers of another one."""
        return dataclasses.replace(
            numbers, window_x=self.window_x, window_y=self.window_y, block_y=self.block_y
        )

    def own(self) -> "Watch":
        """True for what belongs to one client, the numbers of its adjoint; False for the rest."""
        mask: Any = jax.tree.map(lambda _: False, self)
        now, before = (
            dataclasses.replace(sums, left=True, right=True) for sums in (mask.now, mask.before)
        )
        return dataclasses.replace(mask, now=now, before=before, adjoint=True, bent=True)

    def idle(self, step: Array) -> Array:
        """Outer steps without a decrease of F; 0 unless a window has just ended."""
        return jnp.where(self.began == step, step - jnp.max(self.improved), 0)


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


def watched(watch: Watch, problem: Bilevel, step: Array, outcome: Outcome) -> Watch:
    """The watch after outer step `step`, counted from 0."""
    noisy = is_random(problem.upper_samples) or is_random(problem.lower_samples)
    length = jnp.maximum(_SHORTEST, watch.began // 10)
    closes = step + 1 - watch.began >= length
    block_closes = closes | (step + 1 - watch.block_began >= length // _BLOCKS)
    watch = dataclasses.replace(
        _with_y(watch, problem, outcome, block_closes),
        noisy=jnp.asarray(noisy),
        block_began=jnp.where(block_closes, step + 1, watch.block_began),
    )
    if outcome.seen is not None and outcome.before is not None:
        watch = _with_x(watch, problem, outcome, outcome.before, outcome.seen)
    return _closed(watch, outcome, step, closes, noisy=noisy)


def _with_y(watch: Watch, problem: Bilevel, outcome: Outcome, closes: Array) -> Watch:
    """With what y and the adjoint add: y only at the end of a block."""
    per_client, y = problem.lower_set.per_client, outcome.y

    def dot(a: PyTree, b: PyTree) -> Array:
        return inner(a, b, per_client=per_client)

    def moved() -> tuple[Array, Array, Array]:
        last = jax.tree.map(jnp.subtract, y, watch.block_y)
        earlier = jax.tree.map(jnp.subtract, watch.block_y, watch.window_y)
        return dot(earlier, last), dot(last, last), dot(y, y)

    def still() -> tuple[Array, Array, Array]:
        return jnp.zeros_like(watch.way), jnp.zeros_like(watch.way), watch.length

    drift, moves, length = jax.lax.cond(closes, moved, still)
    now, bent, health = watch.now.plus(drift=drift, moves=moves), watch.bent, outcome.health
    if health is not None:
        now, bent = now.plus(left=health.left, right=health.right), bent | health.bent
    block_y = jax.tree.map(lambda a, b: jnp.where(closes, a, b), y, watch.block_y)
    return dataclasses.replace(watch, now=now, bent=bent, block_y=block_y, length=length)


def _with_x(watch: Watch, problem: Bilevel, outcome: Outcome, before: Seen, seen: Seen) -> Watch:
    """With what the hypergradient adds, in units of the largest one."""

    def dot(a: PyTree, b: PyTree) -> Array:
        return inner(a, b, per_client=problem.upper_set.per_client)

    h, point, always = seen.gradient, outcome.x, seen.fresh is None
    fresh: Any = True if always else seen.fresh
    if not always:
        # Between projections x is off its set: h belongs to the point of the projection before.
        ahead = jax.vmap(axpy) if problem.upper_set.per_client else axpy
        point = ahead(outcome.new_x, seen.rate, h)

    def when_fresh(value: Array) -> Array:
        return value if always else jnp.where(fresh, value, jnp.zeros_like(value))

    size = dot(h, h)
    unit = jnp.maximum(watch.unit, when_fresh(jnp.sqrt(size)))
    divisor = jnp.where(unit > 0, unit, 1.0)
    ratio = jnp.where(unit > 0, watch.unit / divisor, 1.0)
    moved: Any = jax.tree.map(jnp.subtract, point, watch.window_x)
    along, path = when_fresh(dot(moved, h) / divisor), when_fresh(watch.path)
    decrease = when_fresh(before.rate * dot(before.gradient, h) / divisor / divisor)
    square = when_fresh(size / divisor / divisor)
    now = watch.now.rescaled(ratio).plus(
        steps=jnp.asarray(fresh, jnp.int32),
        square=square,
        along=along,
        along_square=along**2,
        along_path=along * path,
        path=path,
        path_square=path**2,
        distance=when_fresh(dot(moved, moved)),
        decrease=decrease,
    )
    return dataclasses.replace(
        watch,
        now=now,
        before=watch.before.rescaled(ratio),
        path=watch.path + when_fresh(seen.rate),
        unit=unit,
        size=square if always else jnp.where(fresh, square, watch.size * ratio**2),
        start=watch.start * ratio**2,
        top=watch.top * ratio**2,
        decrease=watch.decrease * ratio**2 + decrease,
    )


def _closed(watch: Watch, outcome: Outcome, step: Array, closes: Array, *, noisy: bool) -> Watch:
    """With the running window closed, where it is long enough."""
    now, count = watch.now, jnp.maximum(watch.now.steps, 1)
    descends = now.decrease > _PROGRESS * watch.decrease
    if noisy:
        value, error = now.descent(watch.unit)
        # Three, because the largest of many windows is taken.
        sure = value - 3 * error
        descends = descends & (value > 2 * error)
    else:
        value = sure = now.square / count
    way = watch.way + jnp.sqrt(jnp.maximum(now.moves + 2 * now.drift, 0.0))
    followed = now.drifted() <= (_FOLLOWED * natural_way(way, watch.length)) ** 2
    larger = _alike(followed, sure) & (sure > watch.start)
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
        start=jnp.where(larger, sure, watch.start),
        top=jnp.maximum(watch.top, value),
        way=way,
        reach=jnp.maximum(watch.reach, now.distance / count),
        adjoint=jnp.where(_alike(larger, way), now.right / count, watch.adjoint),
        improved=jnp.where(descends, step + 1, watch.improved),
        curvature=curvature,
    )
    return jax.tree.map(lambda a, b: jnp.where(closes, a, b), closed, watch)


def _alike(truth: Array, like: Array) -> Array:
    """`truth` where numbers about x and y are of one shape; else whether it holds for all."""
    return truth if truth.shape == like.shape else jnp.all(truth)
