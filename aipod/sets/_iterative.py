"""`IterativeMap`: a sparse matrix or a linear operator, which is never made dense."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import scipy.sparse
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from aipod.sets._inputs import largest, require_range
from aipod.sets._linear import AbstractMap, DenseMap, too_small
from aipod.sets._types import typed_like

# A dense factor of a larger matrix would be slow.
_DENSE_ENTRIES = 4_000_000


class IterativeMap(AbstractMap):
    """A sparse matrix or a Lineax operator: projections by LSMR, in the memory of A and vectors.

    LSMR started at zero ends in the solution of least norm, for any rank. Acts on pytrees with
    the structure of the operator, whose rows may have been divided by `row_scale`. Solutions are
    kept as they are, without coordinates. Everything is computed in the operator's data types.
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
        image = self.operator.mv(typed_like(v, self.in_structure))
        return image if self.row_scale is None else image * self.row_scale

    def solve(self, b: PyTree) -> PyTree:
        b = typed_like(b, self.out_structure)
        return self._least_norm(b if self.row_scale is None else b / self.row_scale)

    def solve_known(self, b: PyTree, *, stacked: bool = False) -> tuple[PyTree, PyTree]:
        # b has a value, also when this is called inside jit.
        with jax.ensure_compile_time_eval():
            return _solve_and_miss(self, b, stacked)

    def lift(self, coordinates: PyTree) -> PyTree:
        return coordinates

    def project(self, v: PyTree, coordinates: PyTree) -> PyTree:
        return optax.tree.add(self.tangent(v), coordinates)

    def pull(self, matrix: Array) -> None:
        return None

    def dense(self) -> DenseMap:
        columns = sum(s.size for s in jax.tree.leaves(self.in_structure))
        rows = sum(s.size for s in jax.tree.leaves(self.out_structure))
        if rows * columns > _DENSE_ENTRIES:
            raise ValueError(
                f"bounds beside equalities need A as a dense matrix of at most {_DENSE_ENTRIES:,} "
                f"entries, but it has {rows} rows and {columns} columns: split the set into a "
                "Product, or leave the bounds out."
            )
        with jax.ensure_compile_time_eval():
            return DenseMap(np.asarray(_matrix(self)), jnp.result_type(float))

    def tangent(self, v: PyTree) -> PyTree:
        v = typed_like(v, self.in_structure)
        # The second pass removes what the first has left of the row space.
        once = optax.tree.sub(v, self._least_norm(self.operator.mv(v)))
        return optax.tree.sub(once, self._least_norm(self.operator.mv(once)))

    def _least_norm(self, b: PyTree) -> PyTree:
        # A finite conlim would stop LSMR early on rank-deficient maps, which it solves correctly.
        solver = lx.LSMR(
            rtol=self.rtol, atol=self.rtol, max_steps=self.max_steps, conlim=float("inf")
        )
        return lx.linear_solve(self.operator, b, solver, throw=False).value


@eqx.filter_jit
def _matrix(map: IterativeMap) -> Array:
    """A, one row at a time: there are usually fewer of them than columns."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), map.out_structure)
    flat, restore = ravel_pytree(zeros)
    transposed = jax.linear_transpose(map.mv, map.in_structure)
    return jax.vmap(lambda row: ravel_pytree(transposed(restore(row))[0])[0])(jnp.eye(flat.size))


@eqx.filter_jit
def _solve_and_miss(map: IterativeMap, b: PyTree, stacked: bool) -> tuple[PyTree, PyTree]:
    def solved(b: PyTree) -> tuple[PyTree, PyTree]:
        solution = map.solve(b)
        return solution, optax.tree.sub(map.mv(solution), b)

    return jax.vmap(solved)(b) if stacked else solved(b)


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


def sparse_map(matrix: Any, dtype: Any) -> IterativeMap:
    """An `IterativeMap` of a scipy.sparse matrix.

    Its rows are scaled to length one: LSMR's matrix is then better conditioned, and the set is the
    same.
    """
    csr = scipy.sparse.csr_array(matrix, dtype=np.float64)
    csr.sum_duplicates()
    norms = _row_norms(csr)
    require_range(norms, "A", dtype)
    if norms.size and norms.min() < float(jnp.finfo(dtype).tiny):
        raise ValueError(too_small(dtype))
    coo = scipy.sparse.coo_array(scipy.sparse.diags_array(1 / norms) @ csr)
    order = np.lexsort((coo.col, coo.row))
    product = _SparseProduct(
        jnp.asarray(coo.data[order], dtype),
        jnp.asarray(coo.row[order], jnp.int32),
        jnp.asarray(coo.col[order], jnp.int32),
        csr.shape[0],
    )
    structure = jax.ShapeDtypeStruct((csr.shape[1],), jnp.dtype(dtype))
    # Without closure conversion the product stays a pytree of arrays, and so an argument of the
    # compiled function rather than a constant in it.
    operator = lx.FunctionLinearOperator(product, structure, closure_convert=False)
    return operator_map(operator, jnp.asarray(norms, dtype))


def _row_norms(csr: scipy.sparse.csr_array) -> np.ndarray:
    """The lengths of the rows; 1 for rows of zeros."""
    # In units of a power of two near the largest entry the squares neither overflow nor vanish,
    # and no digit changes.
    unit = np.ldexp(1.0, int(np.frexp(largest(csr.data))[1]))
    scaled = csr / unit
    norms = unit * np.sqrt(np.asarray(scaled.multiply(scaled).sum(axis=1)).ravel())
    return np.where(norms > 0, norms, 1.0)


def operator_map(
    operator: lx.AbstractLinearOperator, row_scale: Array | None = None
) -> IterativeMap:
    """An `IterativeMap` of a Lineax operator."""
    structures = operator.in_structure(), operator.out_structure()
    types = {str(s.dtype) for s in jax.tree.leaves(structures)}
    # Lineax's LSMR works in JAX's default type alone.
    default = str(jnp.result_type(float))
    if types != {default}:
        raise ValueError(
            f"A must be an operator on {default}, got {', '.join(sorted(types)) or 'no arrays'}: "
            "convert its entries, as in lineax.MatrixLinearOperator(matrix.astype(float))."
        )
    eps = float(jnp.finfo(default).eps)
    size = sum(s.size for s in jax.tree.leaves(operator.in_structure()))
    steps = max(1000, min(4 * size, 100_000))
    return IterativeMap(operator, row_scale, rtol=10 * eps, max_steps=steps)


def bcoo_to_scipy(matrix: BCOO) -> Any:
    if matrix.n_sparse != 2:
        raise ValueError(
            "A must be a BCOO matrix with two sparse axes: make it with BCOO.fromdense(matrix), "
            "without n_batch or n_dense."
        )
    indices = np.asarray(matrix.indices)
    coordinates = (indices[:, 0], indices[:, 1])
    return scipy.sparse.coo_array((np.asarray(matrix.data), coordinates), shape=matrix.shape)
