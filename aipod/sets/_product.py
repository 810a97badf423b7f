"""One set for each part of a container."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod.sets._set import AbstractSet


class Product(AbstractSet):
    """One set for each part of a dictionary, a list or a tuple.

    A coupling in any part receives the whole of x.

    **Arguments:**

    - `parts`: the sets, keyed (or ordered) as the parts of y are.

    !!! example
        ```python
        both = aipod.Product({"weights": aipod.Budget(1.0), "bias": aipod.Free()})
        ```
    """

    parts: Any

    def __init__(self, parts: Mapping[str, AbstractSet] | Sequence[AbstractSet]) -> None:
        if isinstance(parts, Mapping) and len({type(key) for key in parts}) > 1:
            raise ValueError(
                f"the keys of a Product must be of one type, which JAX can sort: {list(parts)}."
            )
        if isinstance(parts, Mapping):
            self.parts = dict(parts)
        elif isinstance(parts, list):
            self.parts = list(parts)
        else:
            self.parts = tuple(parts) if isinstance(parts, Iterable) else ()
        if not self.sets() or not all(isinstance(s, AbstractSet) for s in self.sets()):
            raise ValueError(
                "Product takes at least one set for each part, as in {'w': Free()}; a part that is "
                "a container itself takes a Product."
            )

    def sets(self) -> list[AbstractSet]:
        """The sets, in the order of the parts."""
        return list(self._labelled().values())

    def _labelled(self) -> dict[Any, AbstractSet]:
        """The sets by their key, or by their number in a list."""
        return self.parts if isinstance(self.parts, dict) else dict(enumerate(self.parts))

    def _parts_of(self, tree: PyTree) -> dict[Any, PyTree]:
        """The parts of a point by the same keys or numbers."""
        if isinstance(self.parts, dict):
            if not isinstance(tree, Mapping) or set(tree) != set(self.parts):
                keys = sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__
                raise ValueError(
                    f"a Product over {sorted(self.parts)} got {keys}: give every part of the "
                    "point a set, aipod.Free() where it is unconstrained."
                )
            return dict(tree)
        if not isinstance(tree, list | tuple) or len(tree) != len(self.parts):
            raise ValueError(
                f"a Product of {len(self.parts)} sets needs a list or tuple of as many parts."
            )
        return dict(enumerate(tree))

    def _answers(self, function: Callable[..., Any], *trees: PyTree) -> dict[Any, Any]:
        """function(set, part, ...) for every part."""
        parts = [self._parts_of(tree) for tree in trees]
        return {k: function(s, *(part[k] for part in parts)) for k, s in self._labelled().items()}

    def _each(self, function: Callable[..., Any], *trees: PyTree) -> Any:
        """`_answers` in the container of the first tree, or else in that of the sets."""
        answers = self._answers(function, *trees)
        return _like_container(trees[0] if trees else self.parts, answers)

    @property
    def affine(self) -> bool:
        return all(s.affine for s in self.sets())

    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> "Product":
        if self.affine:
            return self
        old = self._each(lambda s: None) if previous is None else previous
        return self._faces(
            lambda s, a, b, p: s.face(a, b, x, step=step, previous=p), y, correction, old
        )

    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]:
        both = self._answers(lambda s, part: s.land(part, x), y)
        point, multipliers = ({k: pair[i] for k, pair in both.items()} for i in (0, 1))
        return _like_container(y, point), _like_container(y, multipliers)

    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree:
        old = self._each(lambda s: None) if previous is None else previous
        found = self._answers(lambda s, a, b, p: s.sides(a, b, x, previous=p), y, multipliers, old)
        return _like_container(self.parts, found)

    def holding(self, active: PyTree) -> "Product":
        return self if self.affine else self._faces(lambda s, part: s.holding(part), active)

    def _faces(self, function: Callable[..., AbstractSet], *trees: PyTree) -> "Product":
        return Product(_like_container(self.parts, self._answers(function, *trees)))

    @property
    def active(self) -> PyTree:
        return self._each(lambda s: s.active)

    def pin(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self._each(lambda s, part: s.pin(part, x), y)

    def loose(self, v: PyTree) -> PyTree:
        return self._each(lambda s, part: s.loose(part), v)

    def single(self, y: PyTree) -> PyTree:
        return self._each(lambda s, part: s.single(part), y)

    @property
    def coupled(self) -> bool:
        return any(s.coupled for s in self.sets())

    @property
    def constrained(self) -> bool:
        return any(s.constrained for s in self.sets())

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        found = self._answers(lambda s, part: s.constraints(part), point).values()
        counts, ranks = zip(*found, strict=True)
        return _total(counts), _total(ranks)

    @property
    def federated(self) -> bool:
        return any(s.federated for s in self.sets())

    def for_round(self, key: PRNGKeyArray) -> "Product":
        # One key for all parts: a client that takes part in a round takes part with everything.
        return Product(self._each(lambda s: s.for_round(key)))

    def directions(self) -> "Product":
        return Product(self._each(lambda s: s.directions()))

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        return self._each(lambda s, part, shift: s.project_corrected(part, shift), y, correction)

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        return self._each(lambda s, a, b: s.keep_absent(a, b), new, old)

    def check_corrections(self, y: PyTree, *, name: str = "set") -> None:
        self._each(lambda s, part: s.check_corrections(part, name=f"a part of {name}"), y)

    def message_size(self, y: PyTree) -> int:
        return sum(self._answers(lambda s, part: s.message_size(part), y).values())

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self._each(lambda s, part: s.project(part, x), y)

    def multiply(self, x: PyTree, exponents: PyTree) -> PyTree:
        return self._each(lambda s, part, e: s.multiply(part, e), x, exponents)

    def tangent(self, v: PyTree) -> PyTree:
        return self._each(lambda s, part: s.tangent(part), v)

    def cotangent(self, gradient: PyTree) -> PyTree:
        return self._each(lambda s, part: s.cotangent(part), gradient)

    def riesz(self, gradient: PyTree) -> PyTree:
        return self._each(lambda s, part: s.riesz(part), gradient)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None:
            return self._each(lambda s: s.anchor(x))
        return self._each(lambda s, part: s.anchor(x, like=part), like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self._each(lambda s, part: s.residual(part, x), y)

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        if like is None:
            found = self._answers(lambda s: s.emptiness(x))
        else:
            found = self._answers(lambda s, part: s.emptiness(x, part), like)
        return functools.reduce(jnp.maximum, found.values())

    def at(self, x: PyTree) -> "Product":
        return Product(self._each(lambda s: s.at(x)))

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        return self._each(lambda s, part: s.follow(part, x), y)

    def example(self) -> PyTree | None:
        known = self._answers(lambda s: s.example())
        return (
            None
            if any(part is None for part in known.values())
            else _like_container(self.parts, known)
        )

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self._answers(lambda s, part: s.check(part, x, name=f"a part of {name}"), y)


def _like_container(container: Any, answers: dict[Any, Any]) -> Any:
    """The answers in a container of the same type; also in a named tuple or an ordered dict."""
    parts, structure = jax.tree_util.tree_flatten_with_path(
        container, is_leaf=lambda node: node is not container
    )
    if isinstance(container, Mapping):
        return jax.tree.unflatten(structure, [answers[path[0].key] for path, _ in parts])
    return jax.tree.unflatten(structure, answers.values())


def _total(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
