"""Adam whose steps find their own length: the default upper level of every solver.

The direction is Adam's, which has no unit; its length, the pace, has the unit of x. It starts at a
hundredth of x0 (eager: a fiftieth) and then follows four pieces of evidence, all free of units.

- The line. The cosine between the new hypergradient and the last move tells how much of the slope
  along that move is left. The pace grows while it is above a third of the best one of late, and
  falls where moves are taken back. This is the idea of hypergradient descent (Almeida et al., 1998;
  Baydin et al., ICLR 2018) with a target that keeps away from the edge. An eager pace falls too
  where noise alone takes moves back: the mean cosine is a little, but surely, below 0.
- The promise. A move dx promises a decrease of F of -<h, dx>, if y follows. What was delivered is
  the decrease of f along the last move of both, -(<grad_x f, dx> + <grad_y f, dy>). As in a trust
  region, the pace falls where much less is delivered than was promised: then y does not follow, the
  hypergradient is wrong, and the line alone would not show it. (With random batches that is seen
  half way along dy.) Where far more is delivered, y is busy with itself, the hypergradient is that
  of an unfinished y, and the pace does not grow.
- The value. The pace falls where f rises.
- The curvature of the lower level. Where it jumps, y has become slower, and so does x.

A start at 0 does not tell the unit of x. From there the pace begins small and grows until the moves
of x can be seen beside what y does by itself; then as above, at most by a share of x that shrinks.

Batches make the first three noisy. So they are bounded in each outer step and averaged over a few.
When the pace has once had to fall, it grows again only slowly and on clear evidence. Against noise
it fades as 1 / sqrt(k) where it does not grow.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod.slots.upper._evidence import Evidence, no_evidence
from aipod.stepsize import StepSize

# Adam's memory of the direction is short: x must not run on after the hypergradient has turned.
_B1, _B2 = 0.5, 0.999
# A gradient so many times longer than usual is a spike.
_SPIKE = 10.0
# Below this share of the largest, a second moment is rounding error and makes no direction.
_ROUNDING = 1e-8
# The first pace as a share of x0, and that of an eager one; where x0 is 0, the first pace.
_SHARE, _EAGER_SHARE, _FROM_ZERO = 1e-2, 2e-2, 1e-6
# The longest pace as a share of x. From x0 = 0 it may be so many times longer at first, or x would
# take long to find its scale; that fades over so many steps without growth.
_MOST, _WIDER, _FINDING = 0.05, 3.0, 30.0
# An eager pace may be up to so many times longer where moves are shorter than this share of it, as
# Adam remembers longer gradients. It grows there while moves promise this share of the largest
# promise.
_LONGER, _SHORT, _PROMISING = 2.0, 0.75, 0.15
# Scales of the leaves of x, as shares of the largest.
_LEAST_SCALE = 1e-3
# log(pace) moves by at most this in an outer step; the line may move it faster in the first few.
_STEP, _BOOST, _FEW = 0.1, 4.0, 5.0
# A fall after so many steps ends the search. From then on it grows at this share of its speed. It
# fades as 1 / sqrt(1 + n / 300) over n steps without growth.
_SEARCH, _LATER, _FADE = 20, 0.3, 300.0
# From x0 = 0, a fall to this share of the largest pace.
_CLEARLY = 0.5
# Where the curvature of the lower level grows by more than this factor in one step, the pace falls
# by as much.
_STIFFER = 2.0


class Pace(eqx.Module):
    """What is kept from one outer step to the next.

    - `count`: the steps made.
    - `first`, `second`: Adam's moments.
    - `scales`: the scale of each leaf of x, as a share of the largest.
    - `least`, `unknown`: the first pace, and whether x0 was 0 and did not tell it.
    - `pace`, `peak`: the length of a step, before it fades, and the largest so far.
    - `found`, `rests`: whether the pace has once had to fall, and how many steps it did not grow.
    - `evidence`: what speaks for a longer or a shorter pace.
    """

    count: Array
    first: PyTree
    second: PyTree
    scales: PyTree
    least: Array
    unknown: Array
    pace: Array
    peak: Array
    found: Array
    rests: Array
    evidence: Evidence


class PacedTransformation(optax.GradientTransformationExtraArgs):
    """An optimiser that wants to know the last move of x, and what it promised and delivered."""


def paced_adam(*, eager: bool = False) -> optax.GradientTransformation:
    """Adam whose steps find their own length, whatever the units of x and f.

    The upper level of every solver unless `upper_lr` or `upper_optimizer` says otherwise. It works
    inside the solvers alone, which tell it whether y follows.

    **Arguments:**

    - `eager`: begin with steps twice as long, let them become twice as long while they promise
        much, and shorten them sooner in noise. E3-AiPOD does so, because each of its outer steps
        costs a round.

    !!! example
        ```python
        solver = aipod.EAiPOD(upper_optimizer=aipod.paced_adam())
        ```
    """
    return _paced_adam(bool(eager))


def paced_unless(
    lr: StepSize | None,
    optimizer: optax.GradientTransformation | None,
    *,
    eager: bool = False,
) -> optax.GradientTransformation | None:
    """The optimiser of a solver: the one given, none where there is a step size, else this one."""
    return paced_adam(eager=eager) if lr is None and optimizer is None else optimizer


# One object of each kind: solvers made with it are equal.
@functools.cache
def _paced_adam(eager: bool) -> PacedTransformation:
    return PacedTransformation(
        functools.partial(_init, eager=eager), functools.partial(_update, eager=eager)
    )


def _init(x: PyTree, *, eager: bool) -> Pace:
    sizes = _sizes(x)
    largest = jnp.max(sizes)
    unit = jnp.where(largest > 0, largest, 1.0)
    # A leaf that starts at 0 does not tell its unit. Such are biases and logarithms: at most 1.
    shares = jnp.where(sizes > 0, sizes, jnp.minimum(unit, 1.0)) / unit
    scales = jnp.clip(shares, _LEAST_SCALE, 1.0)
    share = _EAGER_SHARE if eager else _SHARE
    pace = jnp.where(largest > 0, share * largest, _FROM_ZERO)
    return Pace(
        count=jnp.zeros((), jnp.int32),
        first=optax.tree.zeros_like(x),
        second=optax.tree.zeros_like(x),
        scales=jax.tree.unflatten(jax.tree.structure(x), list(scales)),
        least=pace,
        unknown=largest == 0,
        pace=pace,
        peak=pace,
        found=jnp.asarray(False),
        rests=jnp.zeros((), jnp.int32),
        evidence=no_evidence(pace.dtype),
    )


def _sizes(x: PyTree) -> Array:
    """The root of the mean square of each leaf."""

    def size(leaf: Array) -> Array:
        return jnp.sqrt(jnp.mean(jnp.square(leaf))) if leaf.size else jnp.zeros((), leaf.dtype)

    return jnp.stack([size(leaf) for leaf in jax.tree.leaves(x)])


def _update(
    gradient: PyTree,
    state: Pace,
    params: PyTree = None,
    *,
    moved: PyTree = None,
    promised: Array | None = None,
    delivered: Array | None = None,
    seeming: Array | None = None,
    value: Array | None = None,
    stiffer: Array | float = 1.0,
    eager: bool,
    **_: Any,
) -> tuple[PyTree, Pace]:
    """`moved`: the last move of x; the rest as `Turn.promise` has it."""
    if moved is None or promised is None or delivered is None or value is None:
        raise ValueError(
            "paced_adam() must be told of the last move, which the solvers of aipod do: give it as "
            "upper_optimizer=, by itself, or take optax.adam(1e-3) here."
        )
    begins = state.count <= 1
    gradient = _tamed(gradient, state.evidence.steep, begins)
    direction, first, second = _adam(gradient, state)
    evidence = state.evidence.with_move(gradient, moved, begins)
    seeming = delivered if seeming is None else seeming
    evidence = evidence.with_promise(promised, delivered, seeming, begins)
    evidence = evidence.with_value(value, begins)
    known = evidence.known
    line = evidence.line()
    if eager:
        around = evidence.round_about(state.count)
        line = jnp.where(around > 0, jnp.minimum(line, -around), line)
    line = jnp.where(state.found & (line > 0), _LATER * evidence.clear() * line, line)
    line = line * (1 + _BOOST / (1 + state.count / _FEW))
    # The first cosine does not tell how it changes with the pace.
    line = jnp.where(begins, jnp.minimum(line, 0.0), line)
    # A start at 0 leaves the growth of x alone to tell how far it may go: y must follow it.
    room = evidence.room() * jnp.where(state.unknown, evidence.trust(), 1.0)
    wish = jnp.where(line > 0, room * line, line)
    fall = evidence.doubt(promised, seeming)
    # Doubts about y do not make x slower than it was at first, until the search is over.
    floor = jnp.where(state.found, 0.0, state.least)
    doubted = jnp.where(state.pace > floor, -fall, 0.0)
    wish = jnp.where(fall > 0, jnp.minimum(wish, doubted), wish)
    # From x0 = 0, x must first become large enough to be seen beside what y does by itself.
    unseen = state.unknown & evidence.unseen() & (state.count > 1)
    wish = jnp.where(unseen, 1.0, wish)
    pace = state.pace * jnp.exp(_STEP * wish) / jnp.where(stiffer > _STIFFER, stiffer, 1.0)
    wider = jnp.where(state.unknown, _WIDER / (1 + state.rests / _FINDING), 0.0)
    most = _MOST * (1 + wider) * jnp.max(_sizes(params))
    if eager:
        longer = jnp.where(state.found, 1.0, _shortness(direction)) * most
        promising = promised >= _PROMISING * evidence.promise
        most = jnp.where(promising, longer, jnp.clip(state.pace, most, longer))
    most = jnp.maximum(most, state.least)
    most = jnp.where(unseen, jnp.inf, most)
    rests = (wish <= 0) | (pace >= most)
    pace = jnp.minimum(pace, most)
    # From x0 = 0 the search is long, and in noise the pace falls a little now and then.
    falls = (wish < 0) & (~state.unknown | (pace < _CLEARLY * state.peak))
    new = dataclasses.replace(
        state,
        pace=pace,
        peak=jnp.maximum(pace, state.peak),
        found=state.found | (falls & (state.count > _SEARCH)),
        rests=state.rests + rests,
        evidence=evidence,
    )
    # Without a move there is nothing to learn.
    new = jax.tree.map(lambda a, b: jnp.where(known, a, b).astype(b.dtype), new, state)
    new = dataclasses.replace(new, count=state.count + 1, first=first, second=second)
    length = new.pace / jnp.sqrt(1 + new.rests / _FADE)
    change = jax.tree.map(
        lambda u, scale: (-length * scale * u).astype(u.dtype), direction, state.scales
    )
    return change, new


def _shortness(direction: PyTree) -> Array:
    """How many times shorter than three quarters of the pace a move is, from 1 to 2."""
    size = jnp.sqrt(optax.tree.norm(direction, squared=True) / optax.tree.size(direction))
    return jnp.clip(_SHORT / jnp.where(size > 0, size, 1.0), 1.0, _LONGER)


def _tamed(gradient: PyTree, usual: Array, begins: Array) -> PyTree:
    """The gradient, shortened where it is far longer than those of late.

    One such gradient, of a y that has left its domain for example, would move x by sixteen times
    the pace, and its square would stay in Adam's second moment for a thousand steps.
    """
    size = optax.tree.norm(gradient)
    most = _SPIKE * usual
    tamed = (usual > 0) & (size > most) & ~begins
    factor = jnp.where(tamed, most / jnp.where(size > 0, size, 1.0), 1.0)
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), gradient)


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
