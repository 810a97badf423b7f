"""Flow conservation on a directed graph."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, PyTree

from aipod.sets._affine import AbstractLinearSet, as_coupling
from aipod.sets._base import describe_shapes, require_concrete, require_finite
from aipod.sets._linear import DenseMap, IterativeMap, sparse_map


class Flow(AbstractLinearSet):
    """Flows on a directed graph that meet a demand: inflow - outflow + h(x) = demand, at each node.

    A flow has one entry for each edge; with demands of shape (commodities, nodes) it has shape
    (commodities, edges). Supplies are negative demands, and each commodity's demands sum to zero
    over every connected part of the graph: one row of the incidence matrix is redundant there.

    **Arguments:**

    - `senders`, `receivers`: the node each edge leaves, and the one it enters.
    - `demand`: what each node must keep of the flow.
    - `coupling`: h, a function of x in the shape of `demand`.

    !!! example
        ```python
        # one unit from node 0 to node 2, straight or through node 1
        flow = aipod.Flow([0, 0, 1], [2, 1, 2], jnp.array([-1.0, 0.0, 1.0]))
        flow.project(jnp.zeros(3))  # [2/3, 1/3, 1/3]
        ```
    """

    map: DenseMap | IterativeMap
    target: PyTree
    coupling: Callable[[PyTree], PyTree] | None
    particular: PyTree | None

    # Above this many entries a dense factor is larger and slower than an iterative solve.
    _DENSE_ENTRIES = 4_000_000

    def __init__(
        self,
        senders: ArrayLike,
        receivers: ArrayLike,
        demand: ArrayLike,
        coupling: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        require_concrete((senders, receivers, demand), "Flow")
        require_finite(demand, "demand")
        tail, head = np.asarray(senders), np.asarray(receivers)
        self.target = jnp.asarray(demand, float)
        if self.target.ndim not in (1, 2):
            raise ValueError(
                f"demand must have shape (nodes,) or (commodities, nodes), got {self.target.shape}."
            )
        nodes = self.target.shape[-1]
        if tail.ndim != 1 or tail.shape != head.shape or tail.dtype.kind not in "iu":
            raise ValueError(
                "senders and receivers must be two integer vectors of one length, one entry for "
                f"each edge; their shapes are {tail.shape} and {head.shape}."
            )
        if tail.size and not (
            0 <= min(tail.min(), head.min()) <= max(tail.max(), head.max()) < nodes
        ):
            raise ValueError(
                f"senders and receivers must name nodes 0 to {nodes - 1}: demand has {nodes} nodes."
            )
        edges = np.arange(tail.size)
        entries = np.concatenate([np.ones(tail.size), -np.ones(tail.size)])
        incidence = scipy.sparse.coo_array(
            (entries, (np.concatenate([head, tail]), np.concatenate([edges, edges]))),
            shape=(nodes, tail.size),
        )
        dtype = jnp.result_type(float)
        if nodes * tail.size <= self._DENSE_ENTRIES:
            self.map = DenseMap(incidence.toarray(), dtype)
        else:
            self.map = sparse_map(incidence, dtype)
        self.coupling = as_coupling(coupling)
        self.particular = None
        if self.coupling is None:
            self.particular = self._require_nonempty(
                self.target, "the Flow set (does each demand sum to zero?)"
            )

    @property
    def rank(self) -> int | None:
        """Of all commodities together; None where the graph was too large to factor."""
        own = self.map.rank
        return None if own is None else own * int(np.prod(self.target.shape[:-1], dtype=int))

    def _shape(self) -> tuple[int, ...]:
        return (*self.target.shape[:-1], self.map.in_structure.shape[0])

    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        leaves, structure = jax.tree.flatten(y)
        if len(leaves) != 1 or jnp.shape(leaves[0]) != self._shape():
            raise ValueError(
                f"a flow on this graph is one array of shape {self._shape()}, got "
                f"{describe_shapes(y)}."
            )
        return leaves[0], lambda flat: jax.tree.unflatten(structure, [flat])

    def _per_commodity(self, function: Callable[..., Array], *values: Array) -> Array:
        # The dense map takes a batch as it is; a Lineax operator wants one vector at a time.
        if isinstance(self.map, DenseMap) or values[0].ndim == 1:
            return function(*values)
        return jax.vmap(function)(*values)

    def _tangent(self, flat: PyTree) -> PyTree:
        return self._per_commodity(self.map.tangent, flat)

    def _mv(self, flat: PyTree) -> PyTree:
        return self._per_commodity(self.map.mv, flat)

    def _solve(self, b: PyTree) -> PyTree:
        return self._per_commodity(self.map.solve, b)

    def _lift(self, coordinates: PyTree) -> PyTree:
        return self._per_commodity(self.map.lift, coordinates)

    def _project(self, flat: PyTree, coordinates: PyTree) -> PyTree:
        return self._per_commodity(self.map.project, flat, coordinates)

    def example(self) -> PyTree:
        return jnp.zeros(self._shape(), self.target.dtype)
