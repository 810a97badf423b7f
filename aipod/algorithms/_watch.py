"""What a run sees of its own convergence, from the hypergradients that it computes anyway.

With h_k the projected hypergradient of outer step k, whose noise is fresh in every step:

- the mean of <h_{k-1}, h_k> estimates |grad F|^2 minus b, because the noise of h_{k-1} has moved x:
  b = E |grad F|^2 is the level at which steps of a constant size end in noise;
- the mean of <h_i, h_j> over all pairs of a window forgets that, and estimates the part of
  |grad F|^2 that does not change its direction within the window.

Twice the second minus the first is therefore |grad F|^2 at the iterates, ball of noise included.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.tree import inner
from aipod.problem import Bilevel, is_random
from aipod.slots.adjoint import Health
from aipod.slots.upper import Seen

# A window is a tenth of the steps before it, and at least so long; it has so many blocks.
_SHORTEST = 8
_BLOCKS = 8
# A window goes on where it made at least this share of the whole predicted decrease of F.
_PROGRESS = 1e-4
# y is followed in a window that moves it, consistently, by at most this share of its whole way.
_FOLLOWED = 0.25


class Sums(eqx.Module):
    """Sums over one window; those of hypergradients are in units of `Watch.unit`.

    - `steps`, `blocks`: hypergradients, and blocks of them.
    - `product`, `product_blocks`: <h_{k-1}, h_k>; and over blocks the square of its sum, divided
        by the length.
    - `square`: |h_k|^2.
    - `pair`, `pair_square`, `pairs`: <h_1 + ... + h_{k-1}, h_k> within the window, its square, and
        how many pairs that makes.
    - `decrease`: the predicted decrease of F, alpha <h_{k-1}, h_k>.
    - `drift`, `moves`: over blocks, the displacement of y times that of the window before; and its
        square.
    - `left`, `right`, `implicit`: of the adjoint's `Health`, and |w|^2.
    """

    steps: Array
    blocks: Array
    product: Array
    product_blocks: Array
    square: Array
    pair: Array
    pair_square: Array
    pairs: Array
    decrease: Array
    drift: Array
    moves: Array
    left: Array
    right: Array
    implicit: Array

    def scaled(self, ratio: Array) -> "Sums":
        """In another unit, `ratio` times the old one."""
        two, four = ratio**2, ratio**4
        return dataclasses.replace(
            self,
            product=self.product * two,
            product_blocks=self.product_blocks * four,
            square=self.square * two,
            pair=self.pair * two,
            pair_square=self.pair_square * four,
            decrease=self.decrease * two,
        )

    def estimate(self) -> tuple[Array, Array]:
        """|grad F|^2 with noise, and its standard error; infinite where there are too few steps."""
        count, blocks = jnp.maximum(self.steps, 1), self.blocks
        mean = self.product / count
        spread = self.product_blocks - self.product * mean
        variance = jnp.maximum(spread, 0.0) / jnp.maximum(blocks - 1, 1) / count
        pairs = jnp.maximum(self.pairs, 1.0)
        centre = self.pair / pairs
        error = jnp.sqrt(variance + 4 * self.pair_square / pairs**2)
        return 2 * centre - mean, jnp.where(blocks > 3, error, jnp.inf)


class Watch(eqx.Module):
    """What is kept from one outer step to the next.

    - `total`: the sum of the hypergradients of the running window.
    - `window_y`, `block_y`: y when the running window and block began.
    - `began`, `block_began`: the steps at which they did.
    - `unit`: the largest |h| so far.
    - `now`, `before`: the sums of the running window, and of the one before it.
    - `block_product`, `block_steps`: the same of the running block.
    - `size`: |h|^2 of the last step.
    - `start`: the largest |grad F|^2 of a window in which y was followed, less two standard errors.
    - `decrease`: the predicted decrease of F so far.
    - `way`: how far y has gone, window by window.
    - `bent`: whether the lower level was seen to bend down.
    - `improved`: the last step at the end of a window in which F still decreased.
    - `curvature`: the estimate of the curvature when the last window ended.
    - `noisy`: whether the problem has noise.
    """

    total: PyTree
    window_y: PyTree
    block_y: PyTree
    began: Array
    block_began: Array
    unit: Array
    now: Sums
    before: Sums
    block_product: Array
    block_steps: Array
    size: Array
    start: Array
    decrease: Array
    way: Array
    bent: Array
    improved: Array
    curvature: Array
    noisy: Array


def first_watch(problem: Bilevel, y: PyTree, seen: Seen | None, health: Health | None) -> Watch:
    """Before the first step."""
    none = jnp.zeros((), jnp.int32)
    zero = jnp.zeros(()) if seen is None else jnp.zeros_like(seen.rate)
    along = jnp.zeros_like(inner(y, y, per_client=problem.lower_set.per_client))
    sums = Sums(
        **{name: none for name in ("steps", "blocks")},
        **{
            name: zero
            for name in (
                *("product", "product_blocks", "square", "pair", "pair_square", "decrease"),
                "implicit",
            )
        },
        pairs=jnp.zeros(()),
        **{name: along for name in ("drift", "moves", "left", "right")},
    )
    return Watch(
        total=None if seen is None else seen.gradient,
        window_y=y,
        block_y=y,
        began=none,
        block_began=none,
        unit=zero,
        now=sums,
        before=sums,
        block_product=zero,
        block_steps=none,
        size=zero,
        start=zero,
        decrease=zero,
        way=along,
        bent=jnp.zeros(along.shape, bool),
        improved=none,
        curvature=jnp.zeros(()),
        noisy=jnp.asarray(False),
    )


def watched(
    watch: Watch,
    problem: Bilevel,
    step: Array,
    *,
    before: Seen | None,
    seen: Seen | None,
    y: PyTree,
    health: Health | None,
    implicit: PyTree,
    curvature: Array | None,
) -> Watch:
    """The watch after outer step `step`, counted from 0."""
    noisy = is_random(problem.upper_samples) or is_random(problem.lower_samples)
    length = jnp.maximum(_SHORTEST, watch.began // 10)
    closes = step + 1 - watch.began >= length
    block_closes = closes | (step + 1 - watch.block_began >= jnp.maximum(length // _BLOCKS, 1))
    parts = _of_y(watch, problem, y, health, block_closes)
    if seen is not None and before is not None:
        parts |= _of_x(watch, parts["now"], problem, step, before, seen, implicit, block_closes)
    found = dataclasses.replace(
        watch,
        **parts,
        noisy=jnp.asarray(noisy),
        block_began=jnp.where(block_closes, step + 1, watch.block_began),
    )
    return _closed(found, y, step, closes, noisy=noisy, curvature=curvature)


def _of_y(
    watch: Watch, problem: Bilevel, y: PyTree, health: Health | None, closes: Array
) -> dict[str, Any]:
    """What y and the adjoint add: y only at the end of a block."""
    per_client = problem.lower_set.per_client

    def moved() -> tuple[Array, Array]:
        last = jax.tree.map(jnp.subtract, y, watch.block_y)
        earlier = jax.tree.map(jnp.subtract, watch.block_y, watch.window_y)
        return inner(earlier, last, per_client=per_client), inner(last, last, per_client=per_client)

    def still() -> tuple[Array, Array]:
        return jnp.zeros_like(watch.way), jnp.zeros_like(watch.way)

    drift, moves = jax.lax.cond(closes, moved, still)
    now = watch.now
    now = dataclasses.replace(now, drift=now.drift + drift, moves=now.moves + moves)
    bent = watch.bent
    if health is not None:
        now = dataclasses.replace(now, left=now.left + health.left, right=now.right + health.right)
        bent = bent | health.bent
    block_y = jax.tree.map(lambda a, b: jnp.where(closes, a, b), y, watch.block_y)
    return {"now": now, "bent": bent, "block_y": block_y}


def _of_x(
    watch: Watch,
    now: Sums,
    problem: Bilevel,
    step: Array,
    before: Seen,
    seen: Seen,
    implicit: PyTree,
    closes: Array,
) -> dict[str, Any]:
    """What the hypergradient adds, in units of the largest one."""
    per_client = problem.upper_set.per_client
    h, last = seen.gradient, before.gradient
    size = inner(h, h, per_client=per_client)
    unit = jnp.maximum(watch.unit, jnp.sqrt(size))
    if seen.fresh is not None:
        unit = jnp.where(seen.fresh, unit, watch.unit)
    divisor = jnp.where(unit > 0, unit, 1.0)
    ratio = jnp.where(unit > 0, watch.unit / divisor, 1.0)
    fresh = jnp.ones((), bool) if seen.fresh is None else seen.fresh

    def scaled(value: Array) -> Array:
        return jnp.where(fresh, value / divisor / divisor, 0.0)

    product = scaled(inner(last, h, per_client=per_client))
    pair = scaled(inner(watch.total, h, per_client=per_client))
    square = scaled(size)
    now = now.scaled(ratio)
    sum_of_block = watch.block_product * ratio**2 + product
    steps_of_block = watch.block_steps + fresh
    ended = closes & (steps_of_block > 0)
    of_block = jnp.where(ended, sum_of_block**2 / jnp.maximum(steps_of_block, 1), 0.0)
    decrease = before.rate * product
    now = dataclasses.replace(
        now,
        steps=now.steps + fresh,
        blocks=now.blocks + ended,
        product=now.product + product,
        product_blocks=now.product_blocks + of_block,
        square=now.square + square,
        pair=now.pair + pair,
        pair_square=now.pair_square + pair**2,
        pairs=now.pairs + jnp.where(fresh, now.steps, 0),
        decrease=now.decrease + decrease,
    )
    if implicit is not None:
        size_of_w = inner(implicit, implicit, per_client=per_client)
        now = dataclasses.replace(now, implicit=now.implicit + size_of_w)
    kept = jnp.where(fresh, 1.0, 0.0)
    total = jax.tree.map(lambda a, b: (a + kept * b).astype(a.dtype), watch.total, h)
    return {
        "now": now,
        "before": watch.before.scaled(ratio),
        "total": total,
        "unit": unit,
        "block_product": jnp.where(ended, 0.0, sum_of_block),
        "block_steps": jnp.where(ended, 0, steps_of_block),
        "size": jnp.where(fresh, square, watch.size * ratio**2),
        "start": watch.start * ratio**2,
        "decrease": watch.decrease * ratio**2 + decrease,
    }


def _closed(
    watch: Watch,
    y: PyTree,
    step: Array,
    closes: Array,
    *,
    noisy: bool,
    curvature: Array | None,
) -> Watch:
    """With the running window closed, where it is long enough."""
    now = watch.now
    value, error = now.estimate()
    sure = value - 2 * error
    if not noisy:
        value = sure = now.square / jnp.maximum(now.steps, 1)
    way = watch.way + jnp.sqrt(jnp.maximum(now.moves + 2 * now.drift, 0.0))
    followed = 2 * jnp.mean(now.drift) <= _FOLLOWED**2 * jnp.mean(way) ** 2
    start = jnp.where(followed, jnp.maximum(watch.start, sure), watch.start)
    gain = now.decrease > _PROGRESS * watch.decrease
    if noisy:
        gain = gain & (sure > 0)
    improved = jnp.where(jnp.mean(gain) > 0.5, step + 1, watch.improved)
    estimate = watch.curvature if curvature is None else curvature.astype(watch.curvature.dtype)
    closed = dataclasses.replace(
        watch,
        total=None if watch.total is None else jax.tree.map(jnp.zeros_like, watch.total),
        window_y=y,
        began=step + 1,
        now=jax.tree.map(jnp.zeros_like, now),
        before=now,
        start=start,
        way=way,
        improved=improved,
        curvature=estimate,
    )
    return jax.tree.map(lambda a, b: jnp.where(closes, a, b), closed, watch)
