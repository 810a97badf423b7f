"""Adam whose steps find their own length: the default upper level of every solver.

The direction is Adam's, which has no unit; its length, the pace, has the unit of x. It starts at a
hundredth of x0 and moves by a few per cent in each outer step, on two pieces of evidence.

The line. The cosine between the new hypergradient and the last move tells how much of the slope
along that move is left: as much as ever while steps are short, none where they end at the minimum
along the line, and less than none beyond it. The pace grows while the cosine is above a third of
the best one of late, and falls below it. This is the idea of hypergradient descent (Almeida et al.,
1998; Baydin et al., ICLR 2018) with a target that keeps away from the edge.

The promise. A move dx promises a decrease of F of -<h, dx>, if y follows. What was delivered is the
decrease of f along the last move of both, -(<grad_x f, dx> + <grad_y f, dy>). As in a trust region,
the pace falls where much less is delivered than was promised: then y does not follow, the
hypergradient is wrong, and the line alone would not show it. Where far more is delivered, y is busy
with itself, the hypergradient is that of an unfinished y, and the pace does not grow.

Batches make all of these noisy. So they are averaged over a few outer steps, and the promise counts
as broken only where the averages are several standard errors apart.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.stepsize import StepSize

# Adam's memory of the direction is short: x must not run on after the hypergradient has turned.
_B1, _B2 = 0.5, 0.999
# Below this share of the largest, a second moment is rounding error and makes no direction.
_ROUNDING = 1e-8
# The first pace as a share of x0; where x0 is 0, the first pace.
_SHARE, _FROM_ZERO = 1e-2, 1e-6
# Scales of the leaves of x, as shares of the largest.
_LEAST_SCALE = 1e-3
# log(pace) moves by at most this in an outer step, in the first few by up to five times as much.
_STEP, _BOOST, _FEW = 0.1, 4.0, 5.0
# The cosine is averaged over five steps, its best value over twenty, forgotten by 1 % in each.
_QUICK, _SLOW, _FORGET = 0.8, 0.95, 0.99
# The pace rests where the cosine is this share of its best.
_REST = 1 / 3
# Promised and delivered decreases are averaged over ten steps.
_AVERAGE = 0.9
# A promise is broken when less than half is delivered, and y is busy when more than twice is: by so
# many standard errors. Then the pace falls by up to three times `_STEP`.
_HALF, _TWICE = 0.5, 2.0
_BROKEN, _BUSY, _FALL = 1.5, 2.0, 3.0


class Pace(eqx.Module):
    """What is kept from one outer step to the next.

    - `count`: the steps made.
    - `first`, `second`: Adam's moments.
    - `scales`: the scale of each leaf of x, as a share of the largest.
    - `pace`: the length of a step.
    - `quick`, `slow`, `best`: averages of the cosine, and the best one of late.
    - `kept`: averages of the promised and the delivered decrease, and of their products.
    """

    count: Array
    first: PyTree
    second: PyTree
    scales: PyTree
    pace: Array
    quick: Array
    slow: Array
    best: Array
    kept: Array


class PacedTransformation(optax.GradientTransformationExtraArgs):
    """An optimiser that wants to know the last move of x, and what it promised and delivered."""


def paced_adam() -> optax.GradientTransformation:
    """Adam whose steps find their own length, whatever the units of x and f.

    The upper level of every solver unless `upper_lr` or `upper_optimizer` says otherwise. It works
    inside the solvers alone, which tell it whether y follows.

    !!! example
        ```python
        solver = aipod.EAiPOD(upper_optimizer=aipod.paced_adam())
        ```
    """
    return _paced_adam()


def paced_unless(
    lr: StepSize | None, optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation | None:
    """The optimiser of a solver: the one given, none where there is a step size, else this one."""
    return paced_adam() if lr is None and optimizer is None else optimizer


# One object: solvers made with it are equal.
@functools.cache
def _paced_adam() -> PacedTransformation:
    return PacedTransformation(_init, _update)


def _init(x: PyTree) -> Pace:
    leaves, structure = jax.tree.flatten(x)
    sizes = jnp.stack([_mean_size(leaf) for leaf in leaves])
    largest = jnp.max(sizes)
    unit = jnp.where(largest > 0, largest, 1.0)
    # A leaf that starts at 0 does not tell its unit. Such are biases and logarithms: at most 1.
    shares = jnp.where(sizes > 0, sizes, jnp.minimum(unit, 1.0)) / unit
    scales = jnp.clip(shares, _LEAST_SCALE, 1.0)
    zero = jnp.zeros_like(largest)
    return Pace(
        count=jnp.zeros((), jnp.int32),
        first=optax.tree.zeros_like(x),
        second=optax.tree.zeros_like(x),
        scales=jax.tree.unflatten(structure, list(scales)),
        pace=jnp.where(largest > 0, _SHARE * largest, _FROM_ZERO),
        quick=zero,
        slow=zero,
        best=zero,
        kept=jnp.zeros(5, zero.dtype),
    )


def _mean_size(leaf: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(leaf))) if leaf.size else jnp.zeros((), leaf.dtype)


def _update(
    gradient: PyTree,
    state: Pace,
    params: PyTree = None,
    *,
    moved: PyTree = None,
    promised: Array | None = None,
    delivered: Array | None = None,
    **_: Any,
) -> tuple[PyTree, Pace]:
    """`moved`: the last move of x; `promised`, `delivered`: what came of it, as in `Turn`."""
    if moved is None or promised is None or delivered is None:
        raise ValueError(
            "paced_adam() must be told of the last move, which the solvers of aipod do: give it as "
            "upper_optimizer=, by itself, or take optax.adam(1e-3) here."
        )
    direction, first, second = _adam(gradient, state)
    length = optax.tree.norm(gradient) * optax.tree.norm(moved)
    known = length > 0
    cosine = -optax.tree.vdot(gradient, moved) / jnp.where(known, length, 1.0)
    begins = state.count <= 1
    quick = jnp.where(begins, cosine, _QUICK * state.quick + (1 - _QUICK) * cosine)
    slow = jnp.where(begins, cosine, _SLOW * state.slow + (1 - _SLOW) * cosine)
    best = jnp.maximum(slow, _FORGET * state.best)
    numbers = jnp.stack([promised, delivered, promised**2, promised * delivered, delivered**2])
    kept = _AVERAGE * state.kept + (1 - _AVERAGE) * numbers
    wish = _with_promise(_on_line(quick, best), kept, state.count)
    # The first cosine does not tell how it changes with the pace.
    wish = jnp.where(begins, jnp.minimum(wish, 0.0), wish)
    speed = _STEP * (1 + _BOOST / (1 + state.count / _FEW))
    new = (
        state.pace * jnp.exp(speed * wish),
        *(quick, slow, best, kept),
    )
    old = (state.pace, state.quick, state.slow, state.best, state.kept)
    # Without a move there is nothing to learn.
    learnt = [jnp.where(known, a, b).astype(b.dtype) for a, b in zip(new, old, strict=True)]
    after = Pace(state.count + 1, first, second, state.scales, *learnt)
    return jax.tree.map(
        lambda u, scale: (-after.pace * scale * u).astype(u.dtype), direction, state.scales
    ), after


def _adam(gradient: PyTree, state: Pace) -> tuple[PyTree, PyTree, PyTree]:
    """Adam's direction without a unit, and its moments."""
    first = jax.tree.map(lambda m, g: _B1 * m + (1 - _B1) * g, state.first, gradient)
    second = jax.tree.map(lambda v, g: _B2 * v + (1 - _B2) * g * g, state.second, gradient)
    count = state.count + 1
    largest = jnp.max(jnp.stack([jnp.max(v) for v in jax.tree.leaves(second) if v.size]))

    def scaled(m: Array, v: Array) -> Array:
        size = jnp.sqrt(v) + _ROUNDING * jnp.sqrt(largest).astype(v.dtype)
        weight = jnp.sqrt(1 - _B2**count) / (1 - _B1**count)
        return (jnp.where(size > 0, m / jnp.where(size > 0, size, 1), 0) * weight).astype(m.dtype)

    return jax.tree.map(scaled, first, second), first, second


def _on_line(cosine: Array, best: Array) -> Array:
    """How the pace should change, from -3 to 1, by the slope that is left along the last move."""
    tiny = jnp.finfo(cosine.dtype).tiny
    best = jnp.maximum(best, tiny)
    wish = jnp.clip((cosine - _REST * best) / ((1 - _REST) * best), -1.0, 1.0)
    # Beyond the minimum along the line it falls faster, the further the more.
    beyond = jnp.clip(-cosine / best, 0.0, 1.0)
    return wish * (1 + (_FALL - 1) * beyond)


def _with_promise(wish: Array, kept: Array, count: Array) -> Array:
    """The wish, less where y is busy, and a fall where the promise is broken."""
    weight = jnp.maximum(1 - _AVERAGE**count, 1 - _AVERAGE)
    promised, delivered, promised2, both, delivered2 = kept / weight
    independent = (1 + _AVERAGE) / (1 - _AVERAGE) * weight

    def errors_above(share: float) -> Array:
        """By how many standard errors more is delivered than this share of what was promised."""
        variance = delivered2 - 2 * share * both + share**2 * promised2
        error = jnp.sqrt(jnp.maximum(variance, 0.0) / independent)
        return (delivered - share * promised) / jnp.where(error > 0, error, 1.0)

    less, more = errors_above(_HALF), errors_above(_TWICE)
    room = jnp.clip(_TWICE * promised / jnp.where(delivered > 0, delivered, 1.0), 0.0, 1.0)
    busy = (more > _BUSY) & (delivered > 0)
    wish = jnp.where(busy & (wish > 0), room * wish, wish)
    fall = _FALL * jnp.clip(less + _BROKEN, -1.0, 0.0)
    return jnp.where(less < -_BROKEN, jnp.minimum(wish, fall), wish)
