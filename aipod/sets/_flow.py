"""Flow conservation on a directed graph."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import ArrayLike, PyTree

from aipod._misc.tree import to_device
from aipod.sets._inputs import as_real_array, describe_shapes, require_concrete
from aipod.sets._iterative import sparse_map
from aipod.sets._linear import AbstractMap, DenseMap, StackedMap
from aipod.sets._linear_set import AbstractLinearSet, Equations
from aipod.sets._right import RightHandSide, as_coupling


class Flow(AbstractLinearSet):
    """Flows on a directed graph that meet a demand: inflow - outflow + h(x) = demand, at each node.

    A flow has one entry for each edge; with demands of shape (commodities, nodes) it has shape
    (commodities, edges). Supplies are negative demands, and each commodity's demands sum to zero
    over every connected part of the graph, where one row of the incidence matrix is redundant.

    **Arguments:**

    - `senders`, `receivers`: the node each edge leaves, and the one it enters.
    - `demand`: how much of the flow each node keeps.
    - `coupling`: h, a function of x in the shape of `demand`.

    !!! example
        ```python
        # one unit from node 0 to node 2, straight or through node 1
        flow = aipod.Flow([0, 0, 1], [2, 1, 2], jnp.array([-1.0, 0.0, 1.0]))
        flow.project(jnp.zeros(3))  # [2/3, 1/3, 1/3]
        ```
    """

    equations: Equations

    # With more entries than this, a dense factor is larger and slower than an iterative solve.
    _DENSE_ENTRIES = 4_000_000

    def __init__(
        self,
        senders: ArrayLike,
        receivers: ArrayLike,
        demand: ArrayLike,
        coupling: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        require_concrete((senders, receivers, demand), "Flow")
        target = to_device(as_real_array(demand, "demand"))
        if target.ndim not in (1, 2) or 0 in target.shape:
            raise ValueError(
                f"demand must have shape (nodes,) or (commodities, nodes), got {target.shape}."
            )
        nodes = target.shape[-1]
        tail, head = _as_nodes(senders, "senders", nodes), _as_nodes(receivers, "receivers", nodes)
        if tail.shape != head.shape:
            raise ValueError(
                "senders and receivers must be two integer vectors of one length, one entry for "
                f"each edge; their shapes are {tail.shape} and {head.shape}."
            )
        map = self._incidence(tail, head, nodes)
        if target.ndim == 2:
            map = StackedMap(map, target.shape[0])
        self.equations = Equations(
            map,
            RightHandSide(target, as_coupling(coupling)),
            name="the Flow set (does each demand sum to zero?)",
        )

    def _incidence(self, tail: np.ndarray, head: np.ndarray, nodes: int) -> AbstractMap:
        edges = np.arange(tail.size)
        entries = np.concatenate([np.ones(tail.size), -np.ones(tail.size)])
        incidence = scipy.sparse.coo_array(
            (entries, (np.concatenate([head, tail]), np.concatenate([edges, edges]))),
            shape=(nodes, tail.size),
        )
        dtype = jnp.result_type(float)
        if nodes * tail.size <= self._DENSE_ENTRIES:
            return DenseMap(incidence.toarray(), dtype)
        return sparse_map(incidence, dtype)

    def _flatten(self, y: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        leaves, structure = jax.tree.flatten(y)
        shape = self.map.in_structure.shape
        if len(leaves) != 1 or jnp.shape(leaves[0]) != shape:
            raise ValueError(
                f"a flow on this graph is one array of shape {shape}, got {describe_shapes(y)}."
            )
        return leaves[0], lambda flat: jax.tree.unflatten(structure, [flat])


def _as_nodes(value: ArrayLike, name: str, nodes: int) -> np.ndarray:
    """One end of every edge."""
    found = as_real_array(value, name)
    # An empty list has no integers that would make it a vector of integers.
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            "senders and receivers must be two integer vectors of one length, one entry for each "
            f"edge; {name} has shape {found.shape} and type {found.dtype}."
        )
    if found.size and not 0 <= found.min() <= found.max() < nodes:
        raise ValueError(
            f"senders and receivers must name nodes 0 to {nodes - 1}: demand has {nodes} nodes."
        )
    return found.astype(np.int64)
