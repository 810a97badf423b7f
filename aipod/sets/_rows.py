"""Equalities beside bounds, {y : A y = b(x), lower <= y <= upper}: what a set needs of A."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.sets._types import typed_like, widened

Restore = Callable[[list[Array]], PyTree]


class AbstractRows(eqx.Module):
    """The equalities A y = b(x). They act on blocks of a point: arrays that share no row."""

    @property
    @abc.abstractmethod
    def coupled(self) -> bool:
        """Whether b moves with x."""

    @abc.abstractmethod
    def fixed(self, x: PyTree) -> "AbstractRows":
        """The same with x fixed."""

    @abc.abstractmethod
    def bare(self) -> "AbstractRows":
        """The same without b, which the methods on blocks are given."""

    @abc.abstractmethod
    def example(self) -> PyTree | None:
        """Zeros in the structure of a point; None where the rows do not know it."""

    @abc.abstractmethod
    def count(self, point: PyTree) -> tuple[int | None, int | None]:
        """The number of rows, and their rank."""

    @abc.abstractmethod
    def blocks(self, tree: PyTree) -> tuple[list[Array], Restore]:
        """A point as blocks in working precision, and the way back."""

    @abc.abstractmethod
    def rights(self, like: PyTree, x: PyTree) -> list[Any]:
        """b(x) for each block."""

    @abc.abstractmethod
    def check(self, y: PyTree, x: PyTree, name: str) -> bool:
        """Whether b is known at x; `ValueError` where it does not fit."""

    @abc.abstractmethod
    def gap(self, v: Array, right: Any) -> Any:
        """A v - b."""

    @abc.abstractmethod
    def nearest(self, y: Array, lower: Array, upper: Array, right: Any) -> tuple[Array, Array]:
        """The nearest point p of the set, and z = y - A'm with p = clip(z), m the multipliers."""

    @abc.abstractmethod
    def factor(self, free: Array) -> Any:
        """What `meet` needs to know of A in the free entries."""

    @abc.abstractmethod
    def meet(self, v: Array, right: Any, free: Array, factor: Any) -> Array:
        """The nearest vector to v with A w = right that differs from v in free entries alone.

        With `right` None it is 0. Linear in v and right together.
        """

    @abc.abstractmethod
    def emptiness(self, lower: Array, upper: Array, right: Any) -> Array:
        """How far A y is from `right` for the best y within the bounds, relative to the numbers."""

    @abc.abstractmethod
    def require(self, lower: Any, upper: Any, right: Any, name: str) -> None:
        """Raises `ValueError` when no y within the bounds satisfies A y = right. NumPy alone."""


class NoRows(AbstractRows):
    """No equality: every leaf of a point is a block."""

    @property
    def coupled(self) -> bool:
        return False

    def fixed(self, x: PyTree) -> "NoRows":
        return self

    def bare(self) -> "NoRows":
        return self

    def example(self) -> PyTree | None:
        return None

    def count(self, point: PyTree) -> tuple[int | None, int | None]:
        return 0, 0

    def blocks(self, tree: PyTree) -> tuple[list[Array], Restore]:
        return leaf_blocks(tree)

    def rights(self, like: PyTree, x: PyTree) -> list[Any]:
        return [None for _ in jax.tree.leaves(like)]

    def check(self, y: PyTree, x: PyTree, name: str) -> bool:
        return True

    def gap(self, v: Array, right: Any) -> Any:
        return jnp.zeros(())

    def nearest(self, y: Array, lower: Array, upper: Array, right: Any) -> tuple[Array, Array]:
        return jnp.clip(y, lower, upper), y

    def factor(self, free: Array) -> Any:
        return None

    def meet(self, v: Array, right: Any, free: Array, factor: Any) -> Array:
        return v

    def emptiness(self, lower: Array, upper: Array, right: Any) -> Array:
        return jnp.zeros(())

    def require(self, lower: Any, upper: Any, right: Any, name: str) -> None:
        pass


def leaf_blocks(tree: PyTree) -> tuple[list[Array], Restore]:
    """Every leaf as a block of its own."""
    leaves, structure = jax.tree.flatten(widened(tree))
    return leaves, lambda blocks: typed_like(jax.tree.unflatten(structure, blocks), tree)
