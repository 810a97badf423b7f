"""`Affine`: a set given by a matrix or a linear operator."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.tree import same_structure, to_device
from aipod.sets._inputs import (
    as_real_array,
    as_reals,
    describe_shapes,
    fits,
    is_real,
    require_concrete,
    require_finite,
    require_range,
    total_size,
)
from aipod.sets._iterative import bcoo_to_scipy, operator_map, sparse_map
from aipod.sets._linear import AbstractMap, DenseMap
from aipod.sets._linear_set import AbstractLinearSet, Equations
from aipod.sets._right import RightHandSide, as_coupling
from aipod.sets._types import working_type


class Affine(AbstractLinearSet):
    """{y : A y + h(x) = c}, for A of any rank.

    A pytree y is ravelled (leaves in JAX's order), unless A is a Lineax operator, which acts on
    its own structure. The paper's X = {x : B x = e} is `Affine(B, e)`.

    **Arguments:**

    - `A`: a dense matrix (factored once; a projection then costs O(d min(r, d - r))), or a
        `scipy.sparse` matrix, a `BCOO`, or a `lineax.AbstractLinearOperator` (never made dense;
        each projection is an LSMR solve to working precision).
    - `c`: the right-hand side; a number stands for all rows.
    - `coupling`: h, a function of x, or a matrix H for h(x) = H x.

    !!! example
        ```python
        simplex_plane = aipod.Affine(jnp.ones((1, 3)), 1.0)
        simplex_plane.project(jnp.zeros(3))  # [1/3, 1/3, 1/3]
        ```
    """

    equations: Equations
    structured: bool = eqx.field(static=True)  # y is taken as the operator takes it, not ravelled

    def __init__(
        self,
        A: Any,
        c: PyTree[ArrayLike] = 0.0,
        coupling: Callable[[PyTree], PyTree] | ArrayLike | None = None,
    ) -> None:
        require_concrete((A, c), "Affine")
        self.structured = isinstance(A, lx.AbstractLinearOperator)
        listed = isinstance(c, list | tuple) and not self.structured
        c = as_real_array(c, "c") if listed else as_reals(c, "c")
        map = _as_map(A)
        right = RightHandSide(_as_target(c, map, self.structured), as_coupling(coupling))
        self.equations = Equations(map, right, name="the set {y : A y = c}")

    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        structure = self.map.in_structure
        if self.structured:
            if not fits(y, structure):
                raise ValueError(
                    "the point does not have the structure and shapes that the operator A takes: "
                    f"{describe_shapes(y)} in place of {describe_shapes(structure)}."
                )
            return y, lambda tree: tree
        if total_size(y) != structure.shape[0]:
            raise ValueError(
                f"the point has {total_size(y)} entries (shape {describe_shapes(y)}), but A has "
                f"{structure.shape[0]} columns: one column is needed for each entry."
            )
        if isinstance(y, jax.Array) and y.ndim == 1:
            return y, lambda flat: flat
        return ravel_pytree(y)


def _as_target(c: PyTree, map: AbstractMap, structured: bool) -> PyTree:
    structure = map.out_structure
    if same_structure(c, 0.0) and jnp.shape(c) == ():
        c = jax.tree.map(lambda s: np.full(s.shape, c), structure)
    if not fits(c, structure):
        if structured:
            raise ValueError(
                "c does not have the structure and shapes that the operator A returns: "
                f"{describe_shapes(c)} in place of {describe_shapes(structure)}."
            )
        raise ValueError(
            f"c has shape {describe_shapes(c)}, but A has {structure.shape[0]} rows: give c "
            f"the shape {structure.shape}, or one number for all rows."
        )

    def converted(rows: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
        require_range(rows, "c", like.dtype)
        return to_device(rows, like.dtype)

    return jax.tree.map(converted, c, structure)


def _as_map(A: Any) -> AbstractMap:
    if isinstance(A, lx.AbstractLinearOperator):
        require_finite(eqx.filter(A, eqx.is_array), "A")
        return operator_map(A)
    if isinstance(A, BCOO):
        _require_matrix(A)
        A = bcoo_to_scipy(A)
    if scipy.sparse.issparse(A):
        entries: Any = A
        _require_matrix(entries)
        as_real_array(entries.tocoo().data, "A")
        return sparse_map(A, jnp.result_type(float))
    if not hasattr(A, "__array__") and not isinstance(A, list | tuple):
        raise ValueError(
            f"A must be a matrix, a sparse matrix or a Lineax operator, got {type(A).__name__}."
        )
    try:
        matrix = np.asarray(A)
    except (TypeError, ValueError) as error:
        raise ValueError("A must be a matrix of real numbers with rows of one length.") from error
    _require_matrix(matrix)
    dtype = A.dtype if isinstance(A, jax.Array) and jnp.issubdtype(A.dtype, jnp.floating) else float
    dtype = working_type(dtype)
    as_real_array(A, "A", dtype=dtype)
    return DenseMap(matrix, dtype)


def _require_matrix(A: Any) -> None:
    if A.ndim != 2:
        raise ValueError(f"A must be a matrix (two axes), got shape {A.shape}.")
    if not is_real(A.dtype):
        raise ValueError(f"A must hold real numbers, got dtype {A.dtype}.")
