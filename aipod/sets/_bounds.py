"""Lower and upper bounds on the entries of a point."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod._misc.tree import same_structure
from aipod.sets._inputs import total_size
from aipod.sets._moving import Moving, as_moving, known


class Bounds(eqx.Module):
    """lower <= y <= upper, entry by entry; either may be infinite."""

    lower: Moving
    upper: Moving

    @property
    def coupled(self) -> bool:
        return self.lower.coupled or self.upper.coupled

    def at(self, like: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        """Both bounds at x, in the shapes of a point."""
        return self.lower.over(like, x), self.upper.over(like, x)

    def fixed(self, x: PyTree) -> "Bounds":
        return Bounds(self.lower.fixed(x), self.upper.fixed(x))

    def count(self, point: PyTree) -> int:
        """How many bounds are finite; all those that move with x are counted."""
        found = 0
        for bound in (self.lower, self.upper):
            if bound.coupled:
                found += total_size(point)
            else:
                leaves = jax.tree.leaves(bound.over(point, None))
                found += sum(int(np.sum(np.isfinite(np.asarray(leaf)))) for leaf in leaves)
        return found

    def excess(self, like: PyTree, x: PyTree) -> Array:
        """By how much a lower bound exceeds its upper one, relative to the two; else 0."""

        def gap(low: Array, high: Array) -> Array:
            crossed = low > high
            size = jnp.maximum(jnp.abs(low), jnp.abs(high))
            over = jnp.where(crossed, low - high, 0.0) / jnp.where(crossed, size, 1.0)
            return jnp.max(over, initial=0.0)

        gaps = jax.tree.leaves(jax.tree.map(gap, *self.at(like, x)))
        return functools.reduce(jnp.maximum, gaps, jnp.zeros(()))

    def example(self, like: PyTree = None) -> PyTree | None:
        """Zeros in the structure of a point; None where numbers stand for arrays of any shape.

        **Arguments:**

        - `like`: a point that was ravelled, where its size is known from elsewhere.
        """
        given = [bound.value for bound in (self.lower, self.upper) if not bound.coupled]
        size = None if like is None else total_size(like)
        for value in given:
            if all(jnp.shape(v) for v in jax.tree.leaves(value)) or total_size(value) == size:
                return jax.tree.map(jnp.zeros_like, value)
        return like if all(same_structure(value, 0.0) for value in given) else None

    def check(self, y: PyTree, x: PyTree, name: str) -> bool:
        """`ValueError` where the bounds do not fit or cross; whether they are known at x."""
        ready = all([self.lower.check(x, name), self.upper.check(x, name)])
        jax.eval_shape(self.at, y, x)
        if ready:
            lower, upper = known(self.at, y, x)
            require_ordered(lower, upper, name)
        return ready


def as_bounds(lower: Any, upper: Any, name: str) -> Bounds:
    """Bounds from what the user gave, which fit each other as far as that can be told."""
    made = Bounds(as_moving(lower, "lower"), as_moving(upper, "upper"))
    low, high = made.lower.value, made.upper.value
    for value, infinity, what in ((low, np.inf, "lower"), (high, -np.inf, "upper")):
        if any(np.any(np.asarray(leaf) == infinity) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"{what} holds {infinity}: no number is beyond it, so {name} is empty."
            )
    if not made.coupled:
        like = made.example()
        several = next((v for v in (low, high) if not same_structure(v, 0.0)), 0.0)
        lower, upper = known(made.at, several if like is None else like, None)
        require_ordered(lower, upper, name)
    return made


def require_ordered(lower: PyTree, upper: PyTree, name: str) -> None:
    low = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(lower)])
    high = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(upper)])
    crossed = low > high
    if np.any(crossed):
        worst = np.argmax(np.where(crossed, low - high, -np.inf))
        raise ValueError(
            f"{name} is empty: lower exceeds upper in {np.sum(crossed)} of {low.size} entries (by "
            f"{low[worst] - high[worst]:.3g} in entry {worst}: {low[worst]:.6g} > "
            f"{high[worst]:.6g}). Make lower <= upper everywhere."
        )
