"""Linear maps with a known null space: what every linear equality constraint needs of its matrix.

`DenseMap` factors a matrix once; `IterativeMap` (in `_iterative.py`) never forms one.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, PyTree

from aipod._misc.tree import to_device


class AbstractMap(eqx.Module):
    """A linear map A. Solutions are kept in coordinates that suit the map; `lift` undoes that."""

    @property
    @abc.abstractmethod
    def rank(self) -> int | None:
        """The rank of A; None where A was never factored."""

    @property
    @abc.abstractmethod
    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes of v in A v."""

    @property
    @abc.abstractmethod
    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes of A v."""

    @abc.abstractmethod
    def mv(self, v: PyTree) -> PyTree:
        """A v."""

    @abc.abstractmethod
    def tangent(self, v: PyTree) -> PyTree:
        """The projection of v on Ker A."""

    @abc.abstractmethod
    def solve(self, b: PyTree) -> PyTree:
        """A^+ b, in coordinates."""

    @abc.abstractmethod
    def solve_known(self, b: PyTree, *, stacked: bool = False) -> tuple[PyTree, PyTree]:
        """`solve`, and A A^+ b - b, for a b that has a value; compiles nothing where possible.

        With `stacked`, b holds several right-hand sides along a leading axis.
        """

    @abc.abstractmethod
    def lift(self, coordinates: PyTree) -> PyTree:
        """A vector from its coordinates."""

    @abc.abstractmethod
    def project(self, v: PyTree, coordinates: PyTree) -> PyTree:
        """The solution nearest to v, given the coordinates of one solution."""

    @abc.abstractmethod
    def pull(self, matrix: Array) -> Array | None:
        """A^+ H in coordinates; None where that would take one solve for each column of H."""

    @abc.abstractmethod
    def dense(self) -> "DenseMap":
        """A as a factored matrix, on ravelled v; of a stack of maps, one of them."""

    @property
    def stacked(self) -> int | None:
        """How many copies of one map this is; None where it is no stack."""
        return None


def too_small(dtype: Any) -> str:
    return (
        f"A is so small that its inverse does not fit {jnp.dtype(dtype)}: multiply A, c and the "
        "coupling by one large factor, which leaves the set as it is."
    )


def _by_rows(v: Float[Array, "*b r"], matrix: Float[Array, "d r"]) -> Float[Array, "*b d"]:
    """v @ matrix.T without the transposed copy of the matrix that XLA would make every time."""
    return jax.lax.dot_general(v, matrix, (((v.ndim - 1,), (1,)), ((), ())))


class DenseMap(AbstractMap):
    """A dense matrix of any rank, factored once by a singular value decomposition.

    `tangent` uses the smaller of two bases, that of the row space and that of the kernel, so a
    projection costs O(d min(r, d - r)). Coordinates are those in the row basis. Everything acts on
    the last axis; leading axes are a batch.
    """

    matrix: Float[Array, "m d"]
    scaled_left: Float[Array, "m r"]  # U / s, so that A^+ = row (U / s)'
    row: Float[Array, "d r"]
    kernel: Float[Array, "d k"] | None

    def __init__(self, matrix: np.ndarray, dtype: Any) -> None:
        rows, columns = matrix.shape
        # Always in float64: the factor is computed once, and every projection inherits its error.
        wide = np.asarray(matrix, np.float64)
        # LAPACK refuses empty matrices; a map without rows or columns has rank 0.
        if wide.size == 0:
            left, values, right = np.zeros((rows, 0)), np.zeros(0), np.eye(columns)
        else:
            left, values, right = scipy.linalg.svd(
                wide, full_matrices=rows < columns, check_finite=False
            )
        top = values[0] if values.size else 0.0
        kind = matrix.dtype if jnp.issubdtype(matrix.dtype, jnp.floating) else np.float64
        rank = int(np.sum(values > max(rows, columns) * float(jnp.finfo(kind).eps) * top))
        if rank and not 1 / float(jnp.finfo(dtype).max) < values[rank - 1]:
            raise ValueError(too_small(dtype))
        self.matrix = to_device(wide, dtype)
        self.scaled_left = to_device(left[:, :rank] / values[:rank], dtype)
        self.row = to_device(right[:rank].T, dtype)
        few_free = columns - rank < rank
        self.kernel = to_device(right[rank:].T, dtype) if few_free else None

    @property
    def rank(self) -> int:
        return self.row.shape[1]

    @property
    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    @property
    def out_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)

    def mv(self, v: Float[Array, "*b d"]) -> Float[Array, "*b m"]:
        return _by_rows(v, self.matrix)

    def tangent(self, v: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        if self.kernel is not None:
            return _by_rows(v @ self.kernel, self.kernel)
        return v - self.lift(v @ self.row)

    def solve(self, b: Float[Array, "*b m"]) -> Float[Array, "*b r"]:
        return b @ self.scaled_left

    def solve_known(
        self, b: Float[Array, "*b m"], *, stacked: bool = False
    ) -> tuple[Array, np.ndarray]:
        right = np.asarray(b)
        coordinates = right @ np.asarray(self.scaled_left)
        miss = coordinates @ np.asarray(self.row).T @ np.asarray(self.matrix).T - right
        return jnp.asarray(coordinates, self.matrix.dtype), miss

    def lift(self, coordinates: Float[Array, "*b r"]) -> Float[Array, "*b d"]:
        return _by_rows(coordinates, self.row)

    def project(
        self, v: Float[Array, "*b d"], coordinates: Float[Array, "*b r"]
    ) -> Float[Array, "*b d"]:
        if self.kernel is not None:
            return self.tangent(v) + self.lift(coordinates)
        # Forming the particular solution itself would read the basis a third time.
        return v + self.lift(coordinates - v @ self.row)

    def pull(self, matrix: Array) -> Array | None:
        slope = np.asarray(self.scaled_left).T @ np.asarray(matrix)
        return jnp.asarray(slope, self.matrix.dtype)

    def dense(self) -> "DenseMap":
        return self


class StackedMap(AbstractMap):
    """One map, applied to each of several vectors: v has a leading axis of length `count`."""

    base: AbstractMap
    count: int = eqx.field(static=True)

    @property
    def rank(self) -> int | None:
        own = self.base.rank
        return None if own is None else own * self.count

    @property
    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self._stacked(self.base.in_structure)

    @property
    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self._stacked(self.base.out_structure)

    def _stacked(self, structure: PyTree) -> PyTree:
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((self.count, *s.shape), s.dtype), structure
        )

    def mv(self, v: PyTree) -> PyTree:
        return jax.vmap(self.base.mv)(v)

    def tangent(self, v: PyTree) -> PyTree:
        return jax.vmap(self.base.tangent)(v)

    def solve(self, b: PyTree) -> PyTree:
        return jax.vmap(self.base.solve)(b)

    def solve_known(self, b: PyTree, *, stacked: bool = False) -> tuple[PyTree, PyTree]:
        return self.base.solve_known(b, stacked=True)

    def lift(self, coordinates: PyTree) -> PyTree:
        return jax.vmap(self.base.lift)(coordinates)

    def project(self, v: PyTree, coordinates: PyTree) -> PyTree:
        return jax.vmap(self.base.project)(v, coordinates)

    def pull(self, matrix: Array) -> Array | None:
        return None

    def dense(self) -> DenseMap:
        return self.base.dense()

    @property
    def stacked(self) -> int | None:
        return self.count
