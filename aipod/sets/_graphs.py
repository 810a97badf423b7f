"""Graphs between clients: how they are given, and weights with which neighbours average."""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from aipod.sets._inputs import real_array

Edges = np.ndarray

NAMED = ("ring", "grid", "exponential", "complete", "erdos-renyi")


def named_edges(
    name: str, clients: int | None, key: PRNGKeyArray | None, probability: float | None
) -> tuple[Edges, int]:
    """The links of a graph with a name, each once, and the number of clients."""
    if name not in NAMED:
        raise ValueError(f"graph must be one of {', '.join(NAMED)}, or a graph, got {name!r}.")
    if clients is None:
        raise ValueError(f"graph {name!r} needs to know how many clients there are: clients=16.")
    if (name == "erdos-renyi") != (key is not None):
        raise ValueError(
            "graph 'erdos-renyi' is random and needs key=jax.random.key(0); no other named graph "
            "takes a key."
        )
    if probability is not None and name != "erdos-renyi":
        raise ValueError(f"probability is for graph 'erdos-renyi', not {name!r}: leave it out.")
    if name == "erdos-renyi":
        return _random(clients, key, probability), clients
    here = np.arange(clients)
    if name == "complete":
        return np.stack(np.triu_indices(clients, 1), 1), clients
    if name == "grid":
        return _grid(clients), clients
    steps = [1] if name == "ring" else [2**k for k in range(clients.bit_length()) if 2**k < clients]
    pairs = [np.stack([here, (here + step) % clients], 1) for step in steps]
    return _once(np.concatenate(pairs)) if clients > 1 else np.zeros((0, 2), int), clients


def _grid(clients: int) -> Edges:
    """As square as the number of clients allows; of a prime number of them, a line."""
    rows = max(d for d in range(1, math.isqrt(clients) + 1) if clients % d == 0)
    place = np.arange(clients).reshape(rows, -1)
    along = np.stack([place[:, :-1].ravel(), place[:, 1:].ravel()], 1)
    down = np.stack([place[:-1].ravel(), place[1:].ravel()], 1)
    return np.concatenate([along, down])


def _random(clients: int, key: Any, probability: float | None) -> Edges:
    """Every link by itself; by default with a probability that nearly always connects them."""
    likely = min(1.0, 2 * math.log(max(clients, 2)) / max(clients - 1, 1))
    share = likely if probability is None else probability
    if not 0 < share <= 1:
        raise ValueError(f"probability must be in (0, 1], got {probability!r}.")
    pairs = np.stack(np.triu_indices(clients, 1), 1)
    drawn = np.asarray(jax.random.uniform(key, (len(pairs),))) < share
    return pairs[drawn]


def given_edges(graph: Any, clients: int | None) -> tuple[Edges, int]:
    """The links of a graph given as a list of pairs or as an adjacency matrix."""
    if hasattr(graph, "tocoo"):  # a sparse matrix of SciPy
        found = graph.tocoo()
        return _adjacent(found.row, found.col, found.data, found.shape, clients)
    listed = not hasattr(graph, "ndim")
    if listed and not isinstance(graph, list | tuple | set | frozenset):
        raise ValueError(
            f"graph must be a name ({', '.join(NAMED)}), a list of pairs of clients or an "
            f"adjacency matrix, got {type(graph).__name__}."
        )
    array = real_array(sorted(graph) if isinstance(graph, set | frozenset) else graph, "graph")
    if array.size == 0:
        return np.zeros((0, 2), int), 1 if clients is None else clients
    if array.ndim != 2:
        raise ValueError(f"graph must have two axes, got shape {array.shape}.")
    square = array.shape[0] == array.shape[1]
    if square and (not listed or array.shape[1] != 2):
        row, column = np.nonzero(array)
        return _adjacent(row, column, array[row, column], array.shape, clients)
    if array.shape[1] != 2:
        raise ValueError(
            f"graph must be a list of pairs of clients or a square matrix, got shape {array.shape}."
        )
    return _listed(array, clients)


def _listed(pairs: np.ndarray, clients: int | None) -> tuple[Edges, int]:
    whole = pairs.astype(int)
    if np.any(whole != pairs) or np.any(whole < 0):
        raise ValueError("graph: clients are numbered 0, 1, 2, ... in a list of pairs.")
    count = int(whole.max()) + 1 if clients is None else clients
    if whole.max() >= count:
        raise ValueError(f"graph names client {whole.max()}, but there are only {count}.")
    _refuse_loops(whole[whole[:, 0] == whole[:, 1], 0])
    return _once(whole), count


def _adjacent(
    row: np.ndarray, column: np.ndarray, data: np.ndarray, shape: Any, clients: int | None
) -> tuple[Edges, int]:
    count = shape[0]
    if shape[0] != shape[1]:
        raise ValueError(f"graph: an adjacency matrix is square, got shape {tuple(shape)}.")
    if clients is not None and clients != count:
        raise ValueError(f"graph is a matrix of {count} clients, but clients={clients}.")
    kept = np.asarray(data) != 0
    row, column, data = row[kept], column[kept], np.asarray(data)[kept]
    if np.any(data != 1):
        raise ValueError(
            "graph: an adjacency matrix holds 0 and 1; give averaging weights as "
            "Gossip(weights=matrix)."
        )
    _refuse_loops(row[row == column])
    there = set(zip(row.tolist(), column.tolist(), strict=True))
    if oneway := [pair for pair in there if pair[::-1] not in there]:
        raise ValueError(
            f"graph has a link from {oneway[0][0]} to {oneway[0][1]} but none back: gossip needs "
            "links in both directions, as in numpy.maximum(graph, graph.T)."
        )
    return _once(np.stack([row, column], 1)), count


def _refuse_loops(at: np.ndarray) -> None:
    if at.size:
        raise ValueError(
            f"graph links client {int(at[0])} to itself: leave self-loops out, the weight of a "
            "client's own value is what its neighbours leave."
        )


def _once(pairs: np.ndarray) -> Edges:
    """Each link once, the smaller client first."""
    return np.unique(np.sort(pairs, axis=1), axis=0)


def require_connected(edges: Edges, clients: int, name: str = "graph") -> None:
    """Raises `ValueError` when some clients cannot be reached from the first one."""
    reached = np.zeros(clients, bool)
    reached[:1] = True
    while True:
        ends = reached[edges]
        more = edges[ends[:, 0] != ends[:, 1]]
        if not more.size:
            break
        reached[more] = True
    if not reached.all():
        apart = np.flatnonzero(~reached)
        shown = ", ".join(str(one) for one in apart[:5]) + (", ..." if apart.size > 5 else "")
        raise ValueError(
            f"{name} is not connected: nothing that client 0 knows ever comes to {shown}. Add "
            "links, leave these clients out, or for a random graph take a larger probability."
        )


def metropolis(edges: Edges, clients: int) -> np.ndarray:
    """1 / (1 + the larger degree) for each link: no client needs to know more than its neighbours.

    On the complete graph every weight is 1 / M, and one exchange is the average.
    """
    degree = np.bincount(edges.ravel(), minlength=clients)
    return 1 / (1 + np.maximum(degree[edges[:, 0]], degree[edges[:, 1]]))


def given_weights(weights: Any, clients: int | None) -> tuple[Edges, np.ndarray, int]:
    """The links of a matrix of averaging weights, their weights, and the number of clients."""
    dense = weights.toarray() if hasattr(weights, "toarray") else weights
    given = real_array(dense, "weights")
    matrix = given.astype(float)
    count = len(matrix)
    if matrix.ndim != 2 or matrix.shape != (count, count) or not count:
        raise ValueError(f"weights must be a square matrix, got shape {given.shape}.")
    if clients is not None and clients != count:
        raise ValueError(f"weights are those of {count} clients, but there are {clients}.")
    if not np.isfinite(matrix).all():
        raise ValueError("weights hold NaN or infinity.")
    # As exact as the type in which they came.
    kind: Any = given.dtype if given.dtype.kind == "f" else float
    off = 10 * float(np.finfo(kind).eps) ** 0.75
    if matrix.min() < -off:
        place = np.unravel_index(matrix.argmin(), matrix.shape)
        raise ValueError(
            f"weights[{place[0]}, {place[1]}] is {matrix.min():.3g}: no weight may be negative; "
            "leave weights out for Metropolis weights."
        )
    if np.abs(matrix - matrix.T).max() > off:
        raise ValueError("weights must be symmetric: try (weights + weights.T) / 2.")
    sums = matrix.sum(1)
    if np.abs(sums - 1).max() > off:
        worst = int(np.abs(sums - 1).argmax())
        raise ValueError(
            f"weights must be doubly stochastic, but row {worst} sums to {sums[worst]:.6g}: put "
            "what is missing on the diagonal, or leave weights out for Metropolis weights."
        )
    matrix = (matrix + matrix.T) / 2
    row, column = np.nonzero(np.triu(matrix, 1) > 0)
    return np.stack([row, column], 1), matrix[row, column], count


def laplacian_spectrum(edges: Edges, weights: np.ndarray, clients: int) -> tuple[float, float]:
    """The second smallest and the largest eigenvalue of I - W."""
    matrix = np.zeros((clients, clients))
    matrix[edges[:, 0], edges[:, 1]] = matrix[edges[:, 1], edges[:, 0]] = -weights
    np.fill_diagonal(matrix, -matrix.sum(1))
    values = np.linalg.eigvalsh(matrix)
    return (float(values[1]), float(values[-1])) if clients > 1 else (1.0, 1.0)
