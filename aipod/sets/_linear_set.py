"""What all sets {y : A y + h(x) = c} with a linear map A share."""

import abc
import functools
from collections.abc import Callable
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod._misc.tree import is_concrete, same_structure
from aipod.sets._dense_rows import DenseRows
from aipod.sets._inputs import largest, total_size
from aipod.sets._linear import AbstractMap
from aipod.sets._right import LinearCoupling, RightHandSide
from aipod.sets._rows import AbstractRows
from aipod.sets._set import AbstractSet
from aipod.sets._types import tolerance, typed_like, unified


class Equations(eqx.Module):
    """A y + h(x) = c, for y as the map takes it, and a particular solution.

    **Arguments:**

    - `name`: what to call the set where it is empty.
    """

    map: AbstractMap
    right: RightHandSide
    # A^+ c in the coordinates of the map, kept where nothing moves it.
    particular: PyTree | None
    # A^+ c and A^+ H for a matrix coupling: the particular solution is then one product.
    reduced: tuple[Array, Array] | None

    def __init__(self, map: AbstractMap, right: RightHandSide, *, name: str) -> None:
        self.map, self.right = map, right
        self.particular = self.reduced = None
        if right.coupling is None:
            self.particular = self.require_solution(right.target, name)
        elif isinstance(right.coupling, LinearCoupling):
            self.reduced = _reduced(map, right.target, right.coupling.matrix)

    @property
    def coupled(self) -> bool:
        return self.right.coupling is not None

    def solution(self, x: PyTree) -> PyTree:
        """A^+ (c - h(x)), in the coordinates of the map."""
        if self.particular is not None:
            return self.particular
        if self.reduced is None or x is None:
            return self.map.solve(self.right.at(x))
        base, slope = self.reduced
        flat = ravel_pytree(x)[0]
        if flat.shape != slope.shape[1:]:
            self.right.at(x)  # says what is wrong
        return base - slope @ flat

    def fixed(self, x: PyTree) -> "Equations":
        """The same equations with x fixed."""
        return eqx.tree_at(
            lambda e: (e.right, e.particular, e.reduced),
            self,
            (self.right.fixed(x), self.solution(x), None),
            is_leaf=lambda leaf: leaf is None,
        )

    def emptiness(self, x: PyTree) -> Array:
        """By how much the nearest y misses A y + h(x) = c, relative to c and c - h(x)."""
        right = self.right.at(x)
        miss = optax.tree.sub(self.map.mv(self.map.lift(self.solution(x))), right)
        scale = jnp.maximum(_largest(right), _largest(self.right.target))
        return jnp.where(scale == 0, 0.0, _largest(miss) / jnp.where(scale == 0, 1.0, scale))

    def require_solution(self, right: PyTree, name: str, x: PyTree = None) -> PyTree:
        """The particular solution for c - h(x), or `ValueError` when there is none."""
        particular, miss = self.map.solve_known(right)
        # Relative to c as well: c - h(x) may be rounding error of a much larger c.
        worst, scale = largest(miss), max(largest(right), largest(self.right.target))
        if not worst <= tolerance((right, x)) * scale:
            raise ValueError(
                f"{name} is empty: no y satisfies A y + h(x) = c (the nearest misses by "
                f"{worst:.3g}). Make c - h(x) lie in the range of A: rows of A that repeat each "
                "other must ask for the same value."
            )
        return particular

    def check(self, x: PyTree, name: str) -> None:
        """Raises `ValueError` when h(x) does not fit, or when there is no solution at x."""
        right = self.right.check(x, name)
        if self.coupled and right is not None and is_concrete(self):
            self.require_solution(right, f"{name} at the given x", x)


def _reduced(map: AbstractMap, target: PyTree, matrix: Array) -> tuple[Array, Array] | None:
    """None where H does not fit; the coupling itself says so when it is called."""
    if not same_structure(target, matrix) or matrix.shape[:1] != jnp.shape(target):
        return None
    slope = map.pull(matrix)
    return None if slope is None else (map.solve_known(target)[0], slope)


def _largest(tree: PyTree) -> Array:
    """The largest absolute value in a tree, also under jit."""
    parts = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.maximum, parts)


class AbstractLinearSet(AbstractSet):
    """{y : A y + h(x) = c} for a linear map A that acts on `_flatten(y)`."""

    equations: eqx.AbstractVar[Equations]

    @abc.abstractmethod
    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """y as the map takes it, and the way back; `ValueError` where y does not fit."""

    @property
    def map(self) -> AbstractMap:
        """A."""
        return self.equations.map

    @property
    def target(self) -> PyTree:
        """c; in a set with x fixed, c - h(x)."""
        return self.equations.right.target

    @property
    def rank(self) -> int | None:
        """The rank of A; None where A was never factored."""
        return self.map.rank

    @property
    def coupled(self) -> bool:
        return self.equations.coupled

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return total_size(self.target), self.rank

    def _taken(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """`_flatten` in working precision; the way back leads to the data types of y."""
        flat, restore = self._flatten(unified(y))
        return flat, lambda flat: typed_like(restore(flat), y)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        flat, restore = self._taken(y)
        return restore(self.map.project(flat, self.equations.solution(x)))

    def tangent(self, v: PyTree) -> PyTree:
        flat, restore = self._taken(v)
        return restore(self.map.tangent(flat))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        particular = self.map.lift(self.equations.solution(x))
        return particular if like is None else self._taken(like)[1](particular)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(self.map.mv(self._taken(y)[0]), self.equations.right.at(x))

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        return self.equations.emptiness(x)

    def at(self, x: PyTree) -> Self:
        if not self.coupled:
            return self
        return eqx.tree_at(lambda s: s.equations, self, self.equations.fixed(x))

    def equalities(self) -> AbstractRows:
        structure, target = self.map.in_structure, self.target
        # A vector stands for any pytree, which is ravelled.
        vector = same_structure(structure, 0.0) and len(structure.shape) == 1
        right = self.equations.right
        if self.map.stacked is None:
            right = RightHandSide(ravel_pytree(target)[0], _ravelled(right.coupling))
        return DenseRows(self.map.dense(), right, None if vector else structure, self.map.stacked)

    def example(self) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.map.in_structure)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self._taken(y)
        self.equations.check(x, name)


def _ravelled(coupling: Callable[[PyTree], PyTree] | None) -> Callable[[PyTree], Array] | None:
    if coupling is None or isinstance(coupling, LinearCoupling):
        return coupling
    return lambda x: ravel_pytree(coupling(x))[0]
