"""Sets given by a matrix or a linear operator."""

import abc
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import scipy.sparse
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, PyTree

from aipod._misc.tree import is_concrete, same_structure, to_device
from aipod.sets._base import (
    MOVES_WITH_X,
    AbstractSet,
    as_reals,
    attach,
    describe_shapes,
    largest,
    require_concrete,
    require_finite,
    total_size,
)
from aipod.sets._linear import (
    DenseMap,
    IterativeMap,
    bcoo_to_scipy,
    operator_map,
    sparse_map,
)


def _fits(tree: PyTree, like: PyTree) -> bool:
    """Whether a tree has the structure and the shapes of another."""
    return same_structure(tree, like) and all(
        jnp.shape(a) == jnp.shape(b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    )


class LinearCoupling(eqx.Module):
    """h(x) = H x, with x ravelled. What `coupling=H` becomes when H is an array."""

    matrix: Array

    def __call__(self, x: PyTree) -> Array:
        flat = ravel_pytree(x)[0]
        if flat.shape[0] != self.matrix.shape[1]:
            raise ValueError(
                f"coupling is a matrix of shape {self.matrix.shape}, but x has {flat.shape[0]} "
                "entries: one column is needed for each."
            )
        return self.matrix @ flat


def as_coupling(coupling: Any) -> Callable[[PyTree], PyTree] | None:
    if coupling is None or callable(coupling):
        return coupling
    matrix = to_device(coupling)
    if matrix.ndim != 2:
        raise ValueError(
            f"coupling must be a function h(x) or a matrix H, got an array of shape {matrix.shape}."
        )
    require_finite(matrix, "coupling")
    return LinearCoupling(matrix)


class AbstractLinearSet(AbstractSet):
    """{y : A y + h(x) = c} for a map A that acts on `_flatten(y)`."""

    map: eqx.AbstractVar[DenseMap | IterativeMap]
    target: eqx.AbstractVar[PyTree]
    coupling: eqx.AbstractVar[Callable[[PyTree], PyTree] | None]
    # A^+ c, kept when nothing moves it; under a coupling it must be found at every x. In the
    # coordinates of the map.
    particular: eqx.AbstractVar[PyTree | None]

    @abc.abstractmethod
    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """y as the map takes it, and the way back."""

    def _mv(self, flat: PyTree) -> PyTree:
        return self.map.mv(flat)

    def _tangent(self, flat: PyTree) -> PyTree:
        return self.map.tangent(flat)

    def _solve(self, b: PyTree) -> PyTree:
        return self.map.solve(b)

    def _lift(self, coordinates: PyTree) -> PyTree:
        return self.map.lift(coordinates)

    def _project(self, flat: PyTree, coordinates: PyTree) -> PyTree:
        return self.map.project(flat, coordinates)

    @property
    def coupled(self) -> bool:
        return self.coupling is not None

    @property
    def rank(self) -> int | None:
        """The rank of A; None where A was never factored."""
        return self.map.rank

    def _right_hand_side(self, x: PyTree) -> PyTree:
        if self.coupling is None:
            return self.target
        if x is None:
            raise ValueError(MOVES_WITH_X)
        shift = self._rows_of(self.coupling(x))
        return optax.tree.sub(self.target, shift)

    def _rows_of(self, value: PyTree) -> PyTree:
        """The coupling's value in the structure of c."""
        if not same_structure(value, self.target):
            value = ravel_pytree(value)[0]
        if not _fits(value, self.target):
            raise ValueError(
                f"coupling h(x) has shape {describe_shapes(value)}, but c has shape "
                f"{describe_shapes(self.target)}: return one value for each row of A."
            )
        return value

    def _particular(self, x: PyTree) -> PyTree:
        if self.particular is not None:
            return self.particular
        return self._solve(self._right_hand_side(x))

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        flat, restore = self._flatten(y)
        return restore(self._project(flat, self._particular(x)))

    def tangent(self, v: PyTree) -> PyTree:
        flat, restore = self._flatten(v)
        return restore(self._tangent(flat))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        particular = self._lift(self._particular(x))
        return particular if like is None else self._flatten(like)[1](particular)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return optax.tree.sub(self._mv(self._flatten(y)[0]), self._right_hand_side(x))

    def at(self, x: PyTree) -> Self:
        if self.coupling is None:
            return self
        fields = (self._right_hand_side(x), None, self._particular(x))
        return eqx.tree_at(
            lambda s: (s.target, s.coupling, s.particular),
            self,
            fields,
            is_leaf=lambda leaf: leaf is None,
        )

    def follow(self, y: PyTree, x: PyTree) -> PyTree:
        if self.coupling is None:
            return y
        flat, restore = self._flatten(y)
        return restore(jax.tree.map(attach, flat, self._lift(self._particular(x))))

    def example(self) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.map.in_structure)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self._flatten(y)
        if self.coupling is not None:
            jax.eval_shape(self._right_hand_side, x)
            if is_concrete((self, x)):
                self._require_nonempty(self._known_right_hand_side(x), f"{name} at the given x")

    def _known_right_hand_side(self, x: PyTree) -> PyTree:
        """c - h(x) where x has a value; H x by NumPy, which has nothing to compile."""
        if isinstance(self.coupling, LinearCoupling):
            flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)])
            shift = self._rows_of(np.asarray(self.coupling.matrix) @ flat)
            return jax.tree.map(lambda c, h: np.asarray(c) - h, self.target, shift)
        with jax.ensure_compile_time_eval():
            return self._right_hand_side(x)

    def _require_nonempty(self, right: PyTree, name: str) -> PyTree:
        """The particular solution for a right-hand side, or `ValueError` when there is none."""
        if isinstance(self.map, DenseMap):
            particular, miss = self.map.solve_on_host(right)
        else:
            # Also inside someone's jit: what is looked at here has a value already.
            with jax.ensure_compile_time_eval():
                particular, miss = _solve_for(self, right)
        # Relative to c as well: c - h(x) may be rounding error of a much larger c.
        worst, scale = largest(miss), max(largest(right), largest(self.target))
        eps = float(jnp.finfo(jnp.result_type(*jax.tree.leaves(right))).eps)
        if not worst <= 100 * eps**0.75 * scale:
            raise ValueError(
                f"{name} is empty: no y satisfies A y + h(x) = c (the nearest misses by "
                f"{worst:.3g}). Make c - h(x) lie in the range of A: rows of A that repeat each "
                "other must ask for the same value."
            )
        return particular


@eqx.filter_jit
def _solve_for(constraint: AbstractLinearSet, right: PyTree) -> tuple[PyTree, PyTree]:
    """A^+ right in the map's coordinates, and by how much it misses A y = right."""
    particular = constraint._solve(right)
    return particular, optax.tree.sub(constraint._mv(constraint._lift(particular)), right)


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

    map: DenseMap | IterativeMap
    target: PyTree
    coupling: Callable[[PyTree], PyTree] | None
    particular: PyTree | None
    # (U / s)' c and (U / s)' H for a matrix coupling: the particular solution is then one product.
    reduced: tuple[Array, Array] | None
    structured: bool = eqx.field(static=True)  # y is taken as the operator takes it, not ravelled

    def __init__(
        self,
        A: Any,
        c: PyTree[ArrayLike] = 0.0,
        coupling: Callable[[PyTree], PyTree] | ArrayLike | None = None,
    ) -> None:
        require_concrete((A, c), "Affine")
        c = as_reals(c, "c")
        self.map = _as_map(A)
        self.structured = isinstance(A, lx.AbstractLinearOperator)
        self.target = self._as_target(c)
        self.coupling = as_coupling(coupling)
        self.particular = self.reduced = None
        if isinstance(self.coupling, LinearCoupling) and isinstance(self.map, DenseMap):
            self.reduced = _reduced(self.map, self.target, self.coupling.matrix)
        if self.coupling is None:
            self.particular = self._require_nonempty(self.target, "the set {y : A y = c}")

    def _as_target(self, c: PyTree) -> PyTree:
        structure = self.map.out_structure
        if same_structure(c, 0.0) and jnp.shape(c) == ():
            return jax.tree.map(lambda s: to_device(np.full(s.shape, c), s.dtype), structure)
        if not _fits(c, structure):
            if self.structured:
                raise ValueError(
                    "c does not have the structure and shapes that the operator A returns: "
                    f"{describe_shapes(c)} in place of {describe_shapes(structure)}."
                )
            raise ValueError(
                f"c has shape {describe_shapes(c)}, but A has {structure.shape[0]} rows: give c "
                f"the shape {structure.shape}, or one number for all rows."
            )
        return jax.tree.map(lambda v, s: jnp.asarray(v, s.dtype), c, structure)

    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        structure = self.map.in_structure
        if self.structured:
            if not _fits(y, structure):
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

    def _particular(self, x: PyTree) -> PyTree:
        if self.coupling is None or self.reduced is None or x is None:
            return super()._particular(x)
        base, slope = self.reduced
        return base - slope @ ravel_pytree(x)[0]


def _reduced(map: DenseMap, target: Array, matrix: Array) -> tuple[Array, Array] | None:
    """None where H does not fit; the coupling itself says so when it is called."""
    if matrix.shape[0] != target.shape[0]:
        return None
    slope = np.asarray(map.scaled_left).T @ np.asarray(matrix)
    return map.solve_on_host(target)[0], jnp.asarray(slope, map.matrix.dtype)


def _as_map(A: Any) -> DenseMap | IterativeMap:
    if isinstance(A, lx.AbstractLinearOperator):
        require_finite(eqx.filter(A, eqx.is_array), "A")
        return operator_map(A)
    if isinstance(A, BCOO):
        A = bcoo_to_scipy(A)
    if scipy.sparse.issparse(A):
        entries: Any = A
        _require_real(entries.dtype)
        require_finite(entries.tocoo().data, "A")
        return sparse_map(A, jnp.result_type(float))
    if not hasattr(A, "__array__") and not isinstance(A, list | tuple):
        raise ValueError(
            f"A must be a matrix, a sparse matrix or a Lineax operator, got {type(A).__name__}."
        )
    matrix = np.asarray(A)
    if matrix.ndim != 2:
        raise ValueError(f"A must be a matrix (two axes), got shape {matrix.shape}.")
    _require_real(matrix.dtype)
    require_finite(matrix, "A")
    dtype = A.dtype if isinstance(A, jax.Array) and matrix.dtype.kind == "f" else float
    return DenseMap(matrix, jnp.result_type(dtype))


def _require_real(dtype: np.dtype) -> None:
    if dtype.kind not in "fiub":
        raise ValueError(f"A must hold real numbers, got dtype {dtype}.")
