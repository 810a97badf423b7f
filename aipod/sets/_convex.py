"""Convex sets that are not affine: a box, a simplex."""

import abc
from typing import NoReturn

from jaxtyping import ArrayLike, PyTree

from aipod.sets._set import AbstractSet


class AbstractConvex(AbstractSet):
    """A closed convex set that is not affine. The projection on it is not linear.

    It answers `project`, `residual`, `face`, `land`, `sides` and `holding`. The directions along
    which it extends differ from point to point: those at a point are the answers of its `face`
    there, which is affine.
    """

    @property
    def affine(self) -> bool:
        return False

    def tangent(self, v: PyTree) -> PyTree:
        self._refuse("tangent")

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        self._refuse("anchor")

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        self._refuse("follow")

    def directions(self) -> AbstractSet:
        self._refuse("directions")

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(
            f"a {type(self).__name__} is not affine, so it has no {method}: take its face at a "
            f"point, as in set.face(y, correction).{method}(...)."
        )

    @abc.abstractmethod
    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> AbstractSet: ...

    @abc.abstractmethod
    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]: ...

    @abc.abstractmethod
    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree: ...

    @abc.abstractmethod
    def holding(self, active: PyTree) -> AbstractSet: ...
