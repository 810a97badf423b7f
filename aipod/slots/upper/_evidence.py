"""What speaks for longer or shorter steps on x, averaged over a few outer steps; all unit-free."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

# Averages over about 5, 10 and 20 outer steps.
_QUICK, _AVERAGE, _SLOW = 0.8, 0.9, 0.95
# The best cosine and the largest promise are forgotten by 1 % in each step. Growth ends where the
# cosine is a third of the best.
_FORGET, _REST = 0.99, 1 / 3
# How much more or less than others a cosine counts.
_WEIGHT = 5.0
# Less than half of the promise is too little, more than twice is not due to x. A promise counts as
# broken where the average of the comparison, which noise alone makes +-0.25, is below -0.4.
_HALF, _TWICE, _BROKEN = 0.5, 2.0, 0.4
# The average of the comparison from which on promises count as kept.
_TRUSTED = 0.1
# What f does by more than so many times the promise is not due to x.
_DUE = 5.0
# Where y makes so many times of it, with either sign, x does nothing yet that could be seen.
_UNSEEN = 100.0
# f rises where its quick average is so many standard errors above its slow one, and goes on rising.
_ERRORS, _GOES_ON = 3.0, 0.03
# Moves are taken back where their average cosine is so many standard errors below 0; by this much
# more it counts in full.
_SURE, _FULL = 2.0, 0.3
# A broken promise, and moves that are taken back at once, count three times.
_FALL = 3.0


class Evidence(eqx.Module):
    """Averages.

    - `steep`: of |h|.
    - `quick`, `slow`: of the cosine between -h and the last move, times a weight, of the weight,
        and of the squared cosine times the weight; over few steps and over more.
    - `best`: the best cosine of late.
    - `kept`: of how far more was delivered than half of what was promised, and than twice of it.
    - `sizes`: of |seeming| and of |promised|.
    - `promise`: the largest promise of late.
    - `level`: of f over few steps and over more, of its squared changes; its last value, and the
        last change of the first average.
    - `known`: whether x has moved at all.
    """

    steep: Array
    quick: Array
    slow: Array
    best: Array
    kept: Array
    sizes: Array
    promise: Array
    level: Array
    known: Array

    def with_move(self, gradient: PyTree, moved: PyTree, begins: Array) -> "Evidence":
        """With the cosine of a new hypergradient and the last move."""
        steep, way = optax.tree.norm(gradient), optax.tree.norm(moved)
        known = (steep > 0) & (way > 0)
        cosine = -optax.tree.vdot(gradient, moved) / jnp.where(known, steep * way, 1.0)
        # A step far beyond the minimum, where the slope is steep, counts for more than several
        # short ones before it.
        usual = jnp.where(begins, steep, self.steep)
        weight = jnp.clip(steep / jnp.where(usual > 0, usual, 1.0), 1 / _WEIGHT, _WEIGHT)
        now = jnp.stack([weight * cosine, weight, weight * cosine**2])
        slow = _averaged(_SLOW, self.slow, now, begins)
        return dataclasses.replace(
            self,
            steep=_averaged(_QUICK, self.steep, steep, begins),
            quick=_averaged(_QUICK, self.quick, now, begins),
            slow=slow,
            best=jnp.maximum(_ratio(slow), _FORGET * self.best),
            known=known,
        )

    def with_promise(
        self, promised: Array, delivered: Array, seeming: Array, begins: Array
    ) -> "Evidence":
        """With what the last move promised and delivered, as in `Promise`."""

        def excess(came: Array, share: float) -> Array:
            size = jnp.abs(came) + share * jnp.abs(promised)
            return (came - share * promised) / jnp.where(size > 0, size, 1.0)

        half = excess(delivered, _HALF)
        # Where f rises by far more than x has promised, it is not x that makes it rise.
        share = _DUE * promised / jnp.where(delivered < 0, -delivered, 1.0)
        half = jnp.where(delivered < -_DUE * promised, half * jnp.clip(share, 0.0, 1.0), half)
        half, twice = (jnp.where(promised > 0, now, 0.0) for now in (half, excess(seeming, _TWICE)))
        # The first from 0 on: y takes a few steps to answer the first moves of x.
        kept = jnp.stack(
            [
                _AVERAGE * self.kept[0] + (1 - _AVERAGE) * half,
                _averaged(_AVERAGE, self.kept[1], twice, begins),
            ]
        )
        both = jnp.abs(jnp.stack([seeming, promised]))
        sizes = _averaged(_AVERAGE, self.sizes, both.astype(kept.dtype), begins)
        largest = jnp.where(begins, promised, jnp.maximum(promised, _FORGET * self.promise))
        return dataclasses.replace(self, kept=kept, sizes=sizes, promise=largest.astype(kept.dtype))

    def with_value(self, value: Array, begins: Array) -> "Evidence":
        """With the value of f on a batch."""
        quick, slow, change, last, _ = self.level
        new = _averaged(_QUICK, quick, value, begins)
        slow = _averaged(_SLOW, slow, value, begins)
        square = jnp.where(begins, 0.0, 0.5 * (value - last) ** 2)
        change = _AVERAGE * change + (1 - _AVERAGE) * square
        more = jnp.where(begins, 0.0, new - quick)
        return dataclasses.replace(self, level=jnp.stack([new, slow, change, value, more]))

    def line(self) -> Array:
        """How the pace should change by the slope left along the last moves, from -3 to 1."""
        quick, slow = _ratio(self.quick), _ratio(self.slow)
        best = jnp.maximum(self.best, jnp.finfo(self.best.dtype).tiny)
        grows = jnp.clip((quick - _REST * best) / ((1 - _REST) * best), 0.0, 1.0)
        # Moves that are taken back have gone beyond the minimum along the line; in noise that shows
        # only after more of them.
        at_once = _FALL * jnp.clip((-quick - 0.3) / 0.4, 0.0, 1.0)
        in_time = jnp.clip((-slow - 0.1) / 0.2, 0.0, 1.0)
        beyond = jnp.maximum(at_once, in_time)
        return jnp.where(beyond > 0, -beyond, grows)

    def round_about(self, count: Array) -> Array:
        """How surely x goes round its goal in noise, and not nearer to it, from 0 to 1.

        Then the mean cosine is below 0 (Pflug, 1983). Where x has many entries, noise alone makes
        small cosines, and a small mean is enough. `count`: how many moves there were.
        """
        slow = _ratio(self.slow)
        first = _SLOW ** (2 * (count - 1))
        share = first + (1 - first) * (1 - _SLOW) / (1 + _SLOW)
        error = jnp.sqrt(share * _square(self.slow))
        return jnp.clip((-slow - _SURE * error) / _FULL, 0.0, 1.0)

    def clear(self) -> Array:
        """How clearly the moves go on in one direction, from 0 to 1."""
        return jnp.clip((_ratio(self.slow) - 0.2) / 0.3, 0.0, 1.0)

    def room(self) -> Array:
        """How much of a growth is due, from 0 to 1: less where y is busy with itself."""
        twice = self.kept[1]
        # Where a constant multiple is delivered, this is 2 promised / delivered.
        return jnp.where(twice > 0, (1 - twice) / (1 + jnp.maximum(twice, 0.0)), 1.0)

    def trust(self) -> Array:
        """How far promises are kept, from 0 to 1; where noise hides it, half."""
        return jnp.clip(0.5 + self.kept[0] / (2 * _TRUSTED), 0.0, 1.0)

    def unseen(self) -> Array:
        """Whether x moves too little for anything that is seen to be due to it."""
        return self.sizes[0] > _UNSEEN * self.sizes[1]

    def doubt(self, promised: Array, seeming: Array) -> Array:
        """How far the pace should fall, from 0 to 3, as promises are broken or f rises."""
        broken = _FALL * jnp.clip((-self.kept[0] - _BROKEN) / (1 - _BROKEN), 0.0, 1.0)
        quick, slow, change, _, more = self.level
        error = jnp.sqrt(change * (1 - _QUICK) / (1 + _QUICK))
        risen = quick - slow
        rises = (risen > _ERRORS * error) & (more > _GOES_ON * risen)
        rises = rises & (jnp.abs(seeming) < _DUE * jnp.abs(promised))
        return jnp.maximum(broken, jnp.where(rises, 1.0, 0.0))


def no_evidence(dtype: Any) -> Evidence:
    """Before the first step."""
    zero, pair, three = jnp.zeros((), dtype), jnp.zeros(2, dtype), jnp.zeros(3, dtype)
    return Evidence(
        zero, three, three, zero, pair, pair, zero, jnp.zeros(5, dtype), jnp.asarray(False)
    )


def _averaged(memory: float, old: Array, now: Array, begins: Array) -> Array:
    return jnp.where(begins, now, memory * old + (1 - memory) * now)


def _ratio(averages: Array) -> Array:
    product, weight, _ = averages
    return product / jnp.where(weight > 0, weight, 1.0)


def _square(averages: Array) -> Array:
    _, weight, square = averages
    return square / jnp.where(weight > 0, weight, 1.0)
