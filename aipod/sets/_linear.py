"""Linear maps with a fixed null space: what every linear equality constraint needs of its matrix.

`DenseMap` factors a matrix once; `IterativeMap` never forms one. Both answer the same questions:
`mv` (A v), `tangent` (the projection of v on Ker A), `solve` (A^+ b, in whatever coordinates suit
the map), `lift` (a vector from those coordinates) and `project` (the nearest solution to v).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import scipy.linalg
import scipy.sparse
from jax.experimental.sparse import BCOO
from jaxtyping import Array, Float, PyTree

from aipod._misc.tree import to_device


def _by_rows(v: Float[Array, "*b r"], matrix: Float[Array, "d r"]) -> Float[Array, "*b d"]:
    """v @ matrix.T, read as it lies in memory: for a `.T` XLA would copy the matrix every time."""
    return jax.lax.dot_general(v, matrix, (((v.ndim - 1,), (1,)), ((), ())))


class DenseMap(eqx.Module):
    """A dense matrix, factored once by a singular value decomposition of any rank.

    Of the row space and the kernel only the smaller basis serves `tangent`, so a projection costs
    O(d min(r, d - r)). Everything acts on the last axis; leading axes are a batch.
    """

    matrix: Float[Array, "m d"]
    scaled_left: Float[Array, "m r"]  # U / s, so that A^+ = row (U / s)'
    row: Float[Array, "d r"]
    kernel: Float[Array, "d k"] | None

    def __init__(self, matrix: np.ndarray, dtype: Any) -> None:
        rows, columns = matrix.shape
        # In float64 whatever the working precision: the factor is made once, its error stays.
        wide = np.asarray(matrix, np.float64)
        # LAPACK refuses empty matrices; a map without rows or columns has rank 0.
        if wide.size == 0:
            left, values, right = np.zeros((rows, 0)), np.zeros(0), np.eye(columns)
        else:
            left, values, right = scipy.linalg.svd(
                wide, full_matrices=rows < columns, check_finite=False
            )
        top = values[0] if values.size else 0.0
        eps = np.finfo(matrix.dtype if matrix.dtype.kind == "f" else np.float64).eps
        rank = int(np.sum(values > max(rows, columns) * eps * top))
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
        """A^+ b in the row basis."""
        return b @ self.scaled_left

    def solve_on_host(self, b: Float[Array, "*b m"]) -> tuple[Array, np.ndarray]:
        """`solve`, and by how much that misses A y = b; by NumPy, which compiles nothing."""
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
        # In the row basis there and back: the solution itself is never formed, which would read
        # the basis a third time.
        return v + self.lift(coordinates - v @ self.row)


class _SparseProduct(eqx.Module):
    """v -> A v for a matrix in coordinate form, entries sorted by row."""

    values: Float[Array, " nnz"]
    rows: Array
    columns: Array
    count: int = eqx.field(static=True)

    def __call__(self, v: Float[Array, " d"]) -> Float[Array, " m"]:
        return jax.ops.segment_sum(
            self.values * v[self.columns], self.rows, self.count, indices_are_sorted=True
        )


class IterativeMap(eqx.Module):
    """A sparse matrix or a Lineax operator: projections by LSMR, in the memory of A and vectors.

    LSMR started at zero ends in the solution of least norm, for any rank. Acts on pytrees with
    the structure of the operator, whose rows may have been divided by `row_scale`.
    """

    operator: lx.AbstractLinearOperator
    row_scale: Array | None
    rtol: float = eqx.field(static=True)
    max_steps: int | None = eqx.field(static=True)

    @property
    def rank(self) -> None:
        return None  # finding it would cost a factorisation

    @property
    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    @property
    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.out_structure()

    def mv(self, v: PyTree) -> PyTree:
        image = self.operator.mv(v)
        return image if self.row_scale is None else image * self.row_scale

    def solve(self, b: PyTree) -> PyTree:
        """A^+ b as it is."""
        return self._least_norm(b if self.row_scale is None else b / self.row_scale)

    def lift(self, coordinates: PyTree) -> PyTree:
        return coordinates

    def project(self, v: PyTree, coordinates: PyTree) -> PyTree:
        return optax.tree.add(self.tangent(v), coordinates)

    def tangent(self, v: PyTree) -> PyTree:
        # A second pass on the remainder removes what the first left of the row space.
        once = optax.tree.sub(v, self._least_norm(self.operator.mv(v)))
        return optax.tree.sub(once, self._least_norm(self.operator.mv(once)))

    def _least_norm(self, b: PyTree) -> PyTree:
        # conlim would end the iteration early on rank-deficient maps, where LSMR is still right.
        solver = lx.LSMR(
            rtol=self.rtol, atol=self.rtol, max_steps=self.max_steps, conlim=float("inf")
        )
        return lx.linear_solve(self.operator, b, solver, throw=False).value


def sparse_map(matrix: Any, dtype: Any) -> IterativeMap:
    """An `IterativeMap` of a scipy.sparse matrix.

    Rows of length one make LSMR's matrix better conditioned and leave the set as it was.
    """
    csr = scipy.sparse.csr_array(matrix, dtype=np.float64)
    csr.sum_duplicates()
    norms = np.sqrt(np.asarray(csr.multiply(csr).sum(axis=1)).ravel())
    norms = np.where(norms > 0, norms, 1.0)
    coo = scipy.sparse.coo_array(scipy.sparse.diags_array(1 / norms) @ csr)
    order = np.lexsort((coo.col, coo.row))
    product = _SparseProduct(
        jnp.asarray(coo.data[order], dtype),
        jnp.asarray(coo.row[order], jnp.int32),
        jnp.asarray(coo.col[order], jnp.int32),
        csr.shape[0],
    )
    structure = jax.ShapeDtypeStruct((csr.shape[1],), jnp.dtype(dtype))
    # The product is itself a pytree of arrays: without closure conversion it stays an argument of
    # whatever is compiled with it.
    operator = lx.FunctionLinearOperator(product, structure, closure_convert=False)
    return operator_map(operator, jnp.asarray(norms, dtype))


def operator_map(
    operator: lx.AbstractLinearOperator, row_scale: Array | None = None
) -> IterativeMap:
    """An `IterativeMap` of a Lineax operator."""
    eps = float(jnp.finfo(jnp.result_type(*jax.tree.leaves(operator.in_structure()))).eps)
    size = sum(s.size for s in jax.tree.leaves(operator.in_structure()))
    steps = max(1000, min(4 * size, 100_000))
    return IterativeMap(operator, row_scale, rtol=10 * eps, max_steps=steps)


def bcoo_to_scipy(matrix: BCOO) -> Any:
    indices = np.asarray(matrix.indices)
    coordinates = (indices[:, 0], indices[:, 1])
    return scipy.sparse.coo_array((np.asarray(matrix.data), coordinates), shape=matrix.shape)
