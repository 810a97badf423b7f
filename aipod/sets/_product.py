"""One set for each part of a container."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PRNGKeyArray, PyTree

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
        if isinstance(parts, Mapping):
            self.parts = dict(parts)
        else:
            self.parts = type(parts)(parts) if isinstance(parts, list) else tuple(parts)
        if not self.sets() or not all(isinstance(s, AbstractSet) for s in self.sets()):
            raise ValueError("Product takes at least one set for each part, as in {'w': Free()}.")

    def sets(self) -> list[AbstractSet]:
        """The sets, in the order of the parts."""
        return list(self.parts.values()) if isinstance(self.parts, dict) else list(self.parts)

    def _each(self, function: Callable[..., Any], *trees: PyTree) -> Any:
        """function(set, part, ...) for every part, in the container of the parts."""
        if isinstance(self.parts, dict):
            for tree in trees:
                if not isinstance(tree, Mapping) or set(tree) != set(self.parts):
                    keys = sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__
                    raise ValueError(
                        f"a Product over {sorted(self.parts)} got {keys}: give every part of the "
                        "point a set, aipod.Free() where it is unconstrained."
                    )
            return {k: function(s, *(t[k] for t in trees)) for k, s in self.parts.items()}
        for tree in trees:
            if not isinstance(tree, list | tuple) or len(tree) != len(self.parts):
                raise ValueError(
                    f"a Product of {len(self.parts)} sets needs a list or tuple of as many parts."
                )
        out = [function(s, *args) for s, *args in zip(self.parts, *trees, strict=True)]
        return type(trees[0])(out) if trees else type(self.parts)(out)

    @property
    def coupled(self) -> bool:
        return any(s.coupled for s in self.sets())

    @property
    def constrained(self) -> bool:
        return any(s.constrained for s in self.sets())

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        found = self._each(lambda s, part: s.constraints(part), point)
        pairs = found.values() if isinstance(found, dict) else found
        counts, ranks = zip(*pairs, strict=True)
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

    def message_size(self, y: PyTree) -> int:
        return sum(jax.tree.leaves(self._each(lambda s, part: s.message_size(part), y)))

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self._each(lambda s, part: s.project(part, x), y)

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

    def at(self, x: PyTree) -> "Product":
        return Product(self._each(lambda s: s.at(x)))

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        return self._each(lambda s, part: s.follow(part, x), y)

    def example(self) -> PyTree | None:
        examples = self._each(lambda s: s.example())
        values = examples.values() if isinstance(examples, dict) else examples
        return None if any(value is None for value in values) else examples

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self._each(lambda s, part: s.check(part, x, name=f"a part of {name}"), y)


def _total(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
