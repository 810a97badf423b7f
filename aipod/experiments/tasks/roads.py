"""Road networks and their traffic: data, routes, and the equilibrium computed in NumPy.

Drivers to each destination use the links that bring them nearer to it (Dial, 1971), by the times
of present traffic. The flows of all destinations form one `Flow` on the disjoint union of these
graphs; an *arc* is a link together with a destination.
"""

import dataclasses
import functools
import warnings

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg

from aipod.experiments.tasks import facts

# Travel times grow as t0 (1 + GROWTH (flow / capacity)^POWER), on every link of the data.
GROWTH, POWER = 0.15, 4


@dataclasses.dataclass(frozen=True)
class Roads:
    """Links with capacities (in thousands of vehicles) and free-flow times, and the trips.

    `trips[i, j]` thousand vehicles go from node i to node j.
    """

    senders: np.ndarray
    receivers: np.ndarray
    capacity: np.ndarray
    free_time: np.ndarray
    trips: np.ndarray
    places: np.ndarray  # (nodes, 2)
    shunned: frozenset[tuple[int, int]] = frozenset()  # arcs that are left out

    @property
    def nodes(self) -> int:
        return len(self.trips)

    def times(self, flows: np.ndarray) -> np.ndarray:
        return self.free_time * (1 + GROWTH * (flows / self.capacity) ** POWER)

    def graph(self, times: np.ndarray) -> scipy.sparse.csr_array:
        edges = (times, (self.senders, self.receivers))
        return scipy.sparse.coo_array(edges, shape=(self.nodes, self.nodes)).tocsr()

    def routes(self, times: np.ndarray) -> np.ndarray:
        """The quickest route of every pair, as zeros and ones of shape (pairs, links)."""
        _, before = scipy.sparse.csgraph.dijkstra(self.graph(times), return_predecessors=True)
        number = np.zeros((self.nodes, self.nodes), int)
        number[self.senders, self.receivers] = np.arange(len(times))
        start, here = self.pairs.T
        uses, rows = np.zeros((len(here), len(times))), np.arange(len(here))
        while len(rows):
            last = before[start, here]
            uses[rows, number[last, here]] = 1
            on = last != start
            rows, start, here = rows[on], start[on], last[on]
        return uses

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """The pairs of nodes between which trips are made."""
        return np.argwhere(self.trips > 0)

    @functools.cached_property
    def present_times(self) -> np.ndarray:
        """Travel times when nearly all drivers take their quickest route.

        Uses successive averages: each day some drivers change to the route that is quickest now.
        """
        trips = self.trips[tuple(self.pairs.T)]
        flows = np.zeros(len(self.capacity))
        for day in range(1, 201):
            flows += (trips @ self.routes(self.times(flows)) - flows) / day
        return self.times(flows)

    @property
    def destinations(self) -> np.ndarray:
        return np.flatnonzero(self.trips.sum(axis=0) > 0)

    @functools.cached_property
    def arcs(self) -> tuple[np.ndarray, np.ndarray]:
        """The destination and the link of every arc."""
        rest = scipy.sparse.csgraph.dijkstra(self.graph(self.present_times))
        found = [(end, k) for end in self.destinations for k in self._links_to(end, rest[:, end])]
        destination, links = np.array(found).T
        return destination, links

    def _links_to(self, end: int, rest: np.ndarray) -> np.ndarray:
        """The links that lead nearer to this destination and that its drivers can reach."""
        nearer = rest[self.receivers] < rest[self.senders]
        nearer[[link for destination, link in self.shunned if destination == end]] = False
        reached = self.trips[:, end] > 0
        for _ in range(self.nodes):
            reached[self.receivers[nearer & reached[self.senders]]] = True
        return np.flatnonzero(nearer & reached[self.senders])

    def demand(self, trips: np.ndarray) -> np.ndarray:
        """The net inflow of each node in each destination's graph."""
        destinations = self.destinations
        kept = -trips.T[destinations]
        kept[np.arange(len(destinations)), destinations] += trips.sum(axis=0)[destinations]
        return kept.ravel()

    def union(self) -> tuple[np.ndarray, np.ndarray]:
        """Senders and receivers of the arcs, with a copy of all nodes for each destination."""
        destination, link = self.arcs
        copy = np.unique(destination, return_inverse=True)[1] * self.nodes
        return copy + self.senders[link], copy + self.receivers[link]


def without_rare(roads: Roads, flows: np.ndarray, least: float) -> Roads:
    """Leaves out the arcs that carry less than this share of a destination's drivers.

    The busiest arc out of each node stays, so that every driver can go on.
    """
    destination, link = roads.arcs
    best: dict[tuple[int, int], int] = {}
    for arc in np.argsort(flows):
        best[int(destination[arc]), int(roads.senders[link[arc]])] = int(arc)
    rare = flows < least * roads.trips.sum(axis=0)[destination]
    rare[list(best.values())] = False
    dropped = zip(destination[rare].tolist(), link[rare].tolist(), strict=True)
    return dataclasses.replace(roads, shunned=roads.shunned | frozenset(dropped))


def sioux_falls() -> Roads:
    """24 nodes, 76 links and 360,600 trips; `facts/README.md` says whose data this is."""
    links = facts.table("sioux_falls_links")
    return Roads(
        senders=np.array(links.rows, int) - 1,
        receivers=links.values[:, 0].astype(int) - 1,
        capacity=links.values[:, 1] / 1000,
        free_time=links.values[:, 2],
        trips=facts.table("sioux_falls_demand").values / 1000,
        places=facts.table("sioux_falls_nodes").values,
    )


def equilibrium(
    roads: Roads, spread: float, days: np.ndarray, tolls: np.ndarray, trips: np.ndarray
) -> np.ndarray:
    """Computes the flow of every arc by Newton steps on the optimality conditions.

    Minimises the lower objective of `tolls.py` over positive flows that meet the demand; steps
    are shortened to keep the flows positive.
    """
    destination, link = roads.arcs
    tail, head = roads.union()
    arcs, rows = len(link), len(roads.destinations) * roads.nodes
    entries = np.concatenate([np.ones(arcs), -np.ones(arcs)])
    places = (np.concatenate([head, tail]), np.tile(np.arange(arcs), 2))
    incidence = scipy.sparse.coo_array((entries, places), shape=(rows, arcs)).tocsr()
    # Nodes without arcs have no conservation law, and one law per destination is redundant.
    kept = np.diff(incidence.indptr) > 0
    kept[np.arange(0, rows, roads.nodes) + roads.destinations] = False
    incidence = incidence[kept]
    shape = (len(roads.capacity), arcs)
    sums = scipy.sparse.coo_array((np.ones(arcs), (link, np.arange(arcs))), shape=shape).tocsr()
    demand = roads.demand(trips)[kept]
    size = roads.trips.sum(axis=0)[destination]  # the scale is fixed at present trips
    rate = GROWTH * np.mean(days**POWER)

    y, prices = 0.1 * size, np.zeros(len(demand))
    for _ in range(200):
        ratio = sums @ y / roads.capacity
        cost = roads.free_time * (1 + rate * ratio**POWER) + tolls
        slope = roads.free_time * rate * POWER * ratio ** (POWER - 1) / roads.capacity
        steep = cost[link] + spread * (1 + np.log(y / size)) + incidence.T @ prices
        hessian = (
            scipy.sparse.diags_array(spread / y) + sums.T @ scipy.sparse.diags_array(slope) @ sums
        )
        system = scipy.sparse.block_array([[hessian, incidence.T], [incidence, None]]).tocsc()
        missing = incidence @ y - demand
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # SciPy warns if the matrix is singular; the step is then NaN
            step = scipy.sparse.linalg.spsolve(system, -np.concatenate([steep, missing]))
        if not np.all(np.isfinite(step)):
            break
        change = step[:arcs]
        falling = change < 0
        length = min(1.0, 0.9 * np.min(-y[falling] / change[falling], initial=np.inf))
        y, prices = y + length * change, prices + length * step[arcs:]
        if np.abs(step[:arcs]).max() < 1e-12 * size.max():
            return y
    raise ValueError(
        f"the traffic did not come to an equilibrium with spread={spread}: take one nearer to 3."
    )
