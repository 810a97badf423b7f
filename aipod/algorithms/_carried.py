"""A state as a compiled loop carries it: its small arrays side by side in a few.

A GPU runs a program of its own for every array that a step changes, and a state has some fifty
numbers. To take a step back, or to put the rows of a cohort back into those of all clients, would
then take as long as the rest of a small step.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from aipod._misc.loops import started_by_host
from aipod.algorithms._state import State

# Arrays of up to so many numbers are small; with a row for each client, so many in a row.
_SMALL, _SMALL_ROW = 256, 64


class Carried(eqx.Module):
    """The arrays of a state.

    - `small`: of each kind, the small ones one behind the other along the last axis.
    - `large`: the others.
    """

    small: tuple[Array, ...]
    large: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a state is carried.

    - `structure`, `shapes`: of the state.
    - `own`: the leaves with a row of its own for each client.
    - `kinds`: of the small leaves their data type and whether they are `own`; None for large ones.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    own: tuple[bool, ...]
    kinds: tuple[tuple[str, bool] | None, ...]

    @staticmethod
    def of(state: State, own: Sequence[bool] | None, *, alone: bool = True) -> "Layout":
        """The layout of states like this one; nothing counts as small where that gains nothing.

        `alone`: whether the arrays are on one device.
        """
        leaves, structure = jax.tree.flatten(state)
        own = (False,) * len(leaves) if own is None else tuple(own)
        kinds = [
            (str(leaf.dtype), mine) if alone and started_by_host() and _small(leaf, mine) else None
            for leaf, mine in zip(leaves, own, strict=True)
        ]
        return Layout(structure, tuple(leaf.shape for leaf in leaves), own, tuple(kinds))

    def _members(self) -> dict[tuple[str, bool], list[int]]:
        """The places of the leaves of each kind."""
        members: dict[tuple[str, bool], list[int]] = {}
        for place, kind in enumerate(self.kinds):
            if kind is not None:
                members.setdefault(kind, []).append(place)
        return members

    def carried(self, state: State) -> Carried:
        leaves = jax.tree.leaves(state)

        def flat(leaf: Array, own: bool) -> Array:
            return leaf.reshape((leaf.shape[0], -1) if own else (-1,))

        small = [
            jnp.concatenate([flat(leaves[place], own) for place in places], axis=-1)
            for (_, own), places in self._members().items()
        ]
        large = [leaf for leaf, kind in zip(leaves, self.kinds, strict=True) if kind is None]
        return Carried(tuple(small), tuple(large))

    def state(self, carried: Carried) -> State:
        """The state again; of fewer clients where the arrays have fewer rows."""
        large = iter(carried.large)
        leaves: list[Any] = [next(large) if kind is None else None for kind in self.kinds]
        for ((_, own), places), array in zip(self._members().items(), carried.small, strict=True):
            start = 0
            for place in places:
                shape = self.shapes[place]
                width = math.prod(shape[1:] if own else shape)
                part = array[..., start : start + width]
                leaves[place] = part.reshape((array.shape[0], *shape[1:]) if own else shape)
                start += width
        return jax.tree.unflatten(self.structure, leaves)

    def by_array(self, function: Callable[..., Array], *carried: Carried) -> Carried:
        """function(array, ..., whether it has a row for each client) for all arrays."""
        large = [own for own, kind in zip(self.own, self.kinds, strict=True) if kind is None]
        flags: Any = (tuple(own for _, own in self._members()), tuple(large))
        found: Carried = jax.tree.map(function, *carried, Carried(*flags))
        return found


def _small(leaf: Array, own: bool) -> bool:
    return math.prod(leaf.shape[1:]) <= _SMALL_ROW if own else leaf.size <= _SMALL
