"""The watch as it travels from step to step: its numbers side by side in a few arrays.

A compiled program handles each array of a state by itself, and fifty numbers of their own would
take longer than the step of a small problem.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, inners
from aipod.algorithms._sums import OF_X, OF_Y, Sums
from aipod.algorithms._watch import Outcome, Watch, at_block_end, block_ends, first_watch
from aipod.problem import Bilevel
from aipod.slots.adjoint import Health
from aipod.slots.upper import Seen

_OF_X = ("path", "unit", "size", "start", "decrease", "top", "reach", "curvature", "noisy")
_OF_Y = ("way", "length", "adjoint", "bent")


class PackedWatch(eqx.Module):
    """A `Watch` in few arrays.

    - `window_x`, `window_y`, `block_y`: as there.
    - `of_x`, `of_y`: numbers about x and about y along the last axis.
    - `whole`: when the running window and block began.
    - `improved`: as there.
    """

    window_x: PyTree
    window_y: PyTree
    block_y: PyTree
    of_x: Array
    of_y: Array
    whole: Array
    improved: Array

    @staticmethod
    def first(problem: Bilevel, x: PyTree, y: PyTree, seen: Seen | None) -> "PackedWatch":
        """Before the first step."""
        return _packed(first_watch(problem, x, y, seen))

    def after(
        self, problem: Bilevel, step: Array, outcome: Outcome, taken_back: Array | None = None
    ) -> "PackedWatch":
        """After outer step `step`, counted from 0; as before it where that is taken back."""
        watch = self
        if outcome.seen is not None and outcome.before is not None:
            of_x = _with_x(self, problem, outcome, outcome.before, outcome.seen)
            watch = dataclasses.replace(watch, of_x=of_x)
        if outcome.health is not None:
            watch = dataclasses.replace(watch, of_y=_with_health(self, outcome.health))
        if taken_back is not None:
            of_x = jnp.where(taken_back, self.of_x, watch.of_x)
            of_y = jnp.where(taken_back, self.of_y, watch.of_y)
            watch = dataclasses.replace(watch, of_x=of_x, of_y=of_y)

        def ends(watch: PackedWatch) -> tuple[Array, Array]:
            end, closes = block_ends(watch.whole[0], watch.whole[1], step)
            return (end if taken_back is None else end & ~taken_back), closes

        def ended(watch: PackedWatch) -> PackedWatch:
            end, closes = ends(watch)

            def changed() -> PackedWatch:
                return _packed(at_block_end(watch.unpacked(), problem, step, outcome, closes))

            # Always so; it keeps XLA from making half of this in every step, before the loop.
            return jax.lax.cond(end, changed, lambda: watch)

        # A loop of at most one turn, since a block that has just begun does not end. For a
        # condition alone XLA would copy all of the watch in every step.
        return jax.lax.while_loop(lambda watch: ends(watch)[0], ended, watch)

    def unpacked(self) -> Watch:
        of_x = [self.of_x[..., i] for i in range(self.of_x.shape[-1])]
        of_y = [self.of_y[..., i] for i in range(self.of_y.shape[-1])]

        def sums(place: int) -> Sums:
            x, y = len(_OF_X) + place * len(OF_X), len(_OF_Y) + place * len(OF_Y)
            found: dict[str, Any] = dict(zip(OF_X, of_x[x : x + len(OF_X)], strict=True))
            found |= zip(OF_Y, of_y[y : y + len(OF_Y)], strict=True)
            return Sums(**found)

        numbers: dict[str, Any] = dict(zip(_OF_X, of_x[: len(_OF_X)], strict=True))
        numbers |= zip(_OF_Y, of_y[: len(_OF_Y)], strict=True)
        numbers |= {name: numbers[name] > 0 for name in ("noisy", "bent")}
        return Watch(
            window_x=self.window_x,
            window_y=self.window_y,
            block_y=self.block_y,
            began=self.whole[0],
            block_began=self.whole[1],
            now=sums(0),
            before=sums(1),
            improved=self.improved,
            **numbers,
        )

    def numbers(self) -> "PackedWatch":
        """Without x and y, which are None."""
        return dataclasses.replace(self, window_x=None, window_y=None, block_y=None)

    def with_numbers(self, numbers: "PackedWatch") -> "PackedWatch":
        """With the numbers of another one."""
        return dataclasses.replace(
            numbers, window_x=self.window_x, window_y=self.window_y, block_y=self.block_y
        )

    def common(self, *, x: bool, y: bool) -> "PackedWatch":
        """True for what all clients have alike, where they share x or y after an outer step."""

        def marked(tree: PyTree, mark: bool) -> Any:
            return jax.tree.map(lambda _: mark, tree)

        return PackedWatch(
            window_x=marked(self.window_x, x),
            window_y=marked(self.window_y, y),
            block_y=marked(self.block_y, y),
            of_x=marked(self.of_x, x),
            of_y=marked(self.of_y, False),
            whole=marked(self.whole, False),
            improved=marked(self.improved, x),
        )

    def own(self) -> "PackedWatch":
        """True for what belongs to one client, its numbers about y; False for the rest."""
        mask: Any = jax.tree.map(lambda _: False, self)
        return dataclasses.replace(mask, of_y=True)

    def idle(self, step: Array) -> Array:
        """Outer steps without a decrease of F; 0 unless a window has just ended."""
        return jnp.where(self.whole[0] == step, step - jnp.max(self.improved), 0)


def _packed(watch: Watch) -> PackedWatch:
    def beside(names: tuple[str, ...], of_sums: tuple[str, ...], like: Array) -> Array:
        parts = [getattr(watch, name) for name in names]
        parts += [getattr(sums, name) for sums in (watch.now, watch.before) for name in of_sums]
        wide = [jnp.broadcast_to(part, like.shape).astype(like.dtype) for part in parts]
        return jnp.stack(wide, axis=-1)

    return PackedWatch(
        window_x=watch.window_x,
        window_y=watch.window_y,
        block_y=watch.block_y,
        of_x=beside(_OF_X, OF_X, watch.unit),
        of_y=beside(_OF_Y, OF_Y, watch.way),
        whole=jnp.stack([watch.began, watch.block_began]),
        improved=watch.improved,
    )


# What a step adds to a sum over the window: the product of two of these, and the power of the unit
# that it is divided by.
_BASE = ("size", "along", "distance", "decrease", "path", "rate", "one", "none")
_TERMS = {
    "steps": ("one", "one", 0),
    "square": ("size", "one", 2),
    "along": ("along", "one", 1),
    "along_square": ("along", "along", 2),
    "along_path": ("along", "path", 1),
    "path": ("path", "one", 0),
    "path_square": ("path", "path", 0),
    "distance": ("distance", "one", 0),
    "decrease": ("decrease", "one", 2),
}
# The same for numbers of the whole run; those with a power are kept in units.
_RUNNING = {
    "path": ("rate", "one", 0),
    "size": ("size", "one", 2),
    "start": ("none", "one", 2),
    "decrease": ("decrease", "one", 2),
    "top": ("none", "one", 2),
}
_NOTHING = ("none", "one", 0)
_ALL = [_RUNNING.get(name, _NOTHING) for name in _OF_X]
_ALL += [_TERMS[name] for name in OF_X]
_ALL += [("none", "one", _TERMS[name][2]) for name in OF_X]
_LEFT, _RIGHT = (np.array([_BASE.index(term[i]) for term in _ALL], np.int32) for i in (0, 1))
_POWER = np.array([term[2] for term in _ALL], np.int32)
_UNIT, _SIZE, _PATH = (_OF_X.index(name) for name in ("unit", "size", "path"))


def _with_x(
    watch: PackedWatch, problem: Bilevel, outcome: Outcome, before: Seen, seen: Seen
) -> Array:
    """`of_x` with what the hypergradient adds, in units of the largest one."""
    per_client, old = problem.upper_set.per_client, watch.of_x
    h, point = seen.gradient, outcome.x
    if seen.fresh is not None:
        # Between projections x is off its set: h belongs to the point of the projection before.
        ahead = jax.vmap(axpy) if per_client else axpy
        point = ahead(outcome.new_x, seen.rate, h)
    moved: Any = jax.tree.map(jnp.subtract, point, watch.window_x)
    pairs = (h, h), (moved, h), (moved, moved), (before.gradient, h)
    size, along, distance, turned = inners(pairs, per_client=per_client)
    rate = seen.rate
    one = jnp.ones_like(rate)
    was, root = old[..., _UNIT], jnp.sqrt(size).astype(old.dtype)
    unit = jnp.maximum(was, root)
    inverse = 1 / jnp.where(unit > 0, unit, 1.0)
    # Exactly 1 in most steps, so that sums stay as they are.
    ratio = jnp.where(root > was, was * inverse, 1.0)
    terms = (size, along, distance, before.rate * turned, old[..., _PATH], rate, one)
    base = jnp.stack([*terms, jnp.zeros_like(rate)], axis=-1).astype(old.dtype)

    def powers(value: Array) -> Array:
        value = value[..., None]
        return jnp.where(_POWER == 2, value**2, jnp.where(_POWER == 1, value, 1.0))

    places = np.arange(len(_ALL), dtype=np.int32)
    # The size is that of the last step; the others are sums.
    kept = jnp.where(places == _SIZE, 0.0, powers(ratio))
    new = old * kept + base[..., _LEFT] * base[..., _RIGHT] * powers(inverse)
    new = jnp.where(places == _UNIT, unit[..., None], new)
    return new if seen.fresh is None else jnp.where(seen.fresh, new, old)


def _with_health(watch: PackedWatch, health: Health) -> Array:
    """`of_y` with what the adjoint adds."""
    named = {name: getattr(health, name) for name in ("bent", "left", "right", "pull")}
    none = jnp.zeros_like(health.left)
    names = (*_OF_Y, *OF_Y)
    now = [jnp.asarray(named.get(name, none), none.dtype) for name in names]
    added = jnp.stack([*now, *(none for _ in OF_Y)], axis=-1)
    return watch.of_y + added.astype(watch.of_y.dtype)
