"""One round of gossip: messages along the links of a graph, some of which may fail."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import coins
from aipod._misc.tree import to_device
from aipod.sets._agreement import AbstractAgreement, beside
from aipod.sets._types import typed_like, widened

# Up to so many different distances i - j between neighbours, messages are shifts of the client
# axis: on a mesh of devices a shift is a collective permute.
_SHIFTS = 24
# A product with a whole matrix is quicker than one with few neighbours for each client up to here.
_DENSE, _SPARSE = 256, 8


class Links(eqx.Module):
    """The links of a graph with their weights, in the form in which messages are summed quickest.

    - `ends`: the two clients of each link, on the first axis.
    - `weights`: of V, one for each link.
    - `places`: for neighbour k of client m, which link leads there; one beyond the last for none.
    - `neighbours`: who that is; None where shifts tell it, and for a product with a matrix.
    - `shifts`: the distance of neighbour k, where it is the same for all clients; else None.
    """

    ends: Array
    weights: Array
    places: Array | None
    neighbours: Array | None
    shifts: tuple[int, ...] | None = eqx.field(static=True)
    clients: int = eqx.field(static=True)
    count: int = eqx.field(static=True)

    def pulled(self, shares: Array, leaf: Array) -> Array:
        """sum_j shares_ij (leaf_j - leaf_i) for each client i, with one share for each link.

        What a link adds to one end it takes from the other, so the sum over clients is zero.
        """
        if self.places is None:
            ends, shape = self.ends, (self.clients, self.clients)
            matrix = jnp.zeros(shape, leaf.dtype).at[ends[0], ends[1]].set(shares)
            matrix = matrix + matrix.T
            # Near agreement small differences are left, whose products have small rounding errors.
            leaf = leaf - leaf[:1]
            near = jnp.tensordot(matrix, leaf, axes=1, precision="highest")
            return near - beside(jnp.sum(matrix, axis=1), leaf) * leaf
        table = jnp.append(shares, 0)[self.places]
        if self.shifts is not None:
            total = jnp.zeros_like(leaf)
            for row, shift in enumerate(self.shifts):
                other = jnp.roll(leaf, -shift, axis=0)
                total = total + beside(table[row], leaf) * (other - leaf)
            return total

        def more(total: Array, near: Any) -> tuple[Array, None]:
            share, who = near
            return total + beside(share, leaf) * (leaf[who] - leaf), None

        return jax.lax.scan(more, jnp.zeros_like(leaf), (table, self.neighbours))[0]

    def highest(self, working: Array, values: Array) -> Array:
        """The largest value of each client and of those neighbours whose links work."""
        if self.shifts is not None and self.places is not None:
            table, found = jnp.append(working, False)[self.places], values
            for row, shift in enumerate(self.shifts):
                other = jnp.where(table[row], jnp.roll(values, -shift), -jnp.inf)
                found = jnp.maximum(found, other)
            return found
        there, back = (jnp.where(working, values[end], -jnp.inf) for end in self.ends[::-1])
        return values.at[self.ends[0]].max(there).at[self.ends[1]].max(back)


def links_of(edges: np.ndarray, weights: np.ndarray, clients: int) -> Links:
    """Links from pairs of clients; made once, with the set."""
    count = len(edges)
    both = np.concatenate([edges, edges[:, ::-1]])
    link = np.concatenate([np.arange(count)] * 2)
    distance = (both[:, 1] - both[:, 0]) % clients
    shifts = np.unique(distance)
    degree = int(np.bincount(both[:, 0], minlength=clients).max()) if count else 0
    places = neighbours = kept = None
    # In a graph that looks the same from every client; of few clients a whole matrix is quicker.
    regular = len(shifts) <= max(4, degree) and 2 * degree <= clients
    if regular and len(shifts) <= _SHIFTS:
        kept = tuple(int(shift) for shift in shifts)
        places = np.full((len(shifts), clients), count)
        places[np.searchsorted(shifts, distance), both[:, 0]] = link
    elif clients > _DENSE and degree * _SPARSE <= clients:
        places = np.full((degree, clients), count)
        neighbours = np.tile(np.arange(clients), (degree, 1))
        filled = np.zeros(clients, int)
        for (here, there), one in zip(both.tolist(), link.tolist(), strict=True):
            places[filled[here], here], neighbours[filled[here], here] = one, there
            filled[here] += 1
    return Links(
        ends=to_device(edges.T, np.int32),
        weights=to_device(weights),
        places=None if places is None else to_device(places, np.int32),
        neighbours=None if neighbours is None else to_device(neighbours, np.int32),
        shifts=kept,
        clients=clients,
        count=count,
    )


class Exchange(AbstractAgreement):
    """One round: every client hears from those neighbours whose links work.

    - `key`: chooses the links that fail; None where none does.
    - `participation`: the share that works.
    """

    links: Links
    key: PRNGKeyArray | None
    participation: float = eqx.field(static=True)

    def _working(self) -> Array | None:
        if self.participation == 1 or self.key is None or not self.links.count:
            return None
        return coins(self.key, self.participation, self.links.count)

    def _shares(self) -> Array:
        working, weights = self._working(), self.links.weights
        return weights if working is None else jnp.where(working, weights, 0.0)

    def _pulled(self, tree: PyTree, shares: Array) -> PyTree:
        return jax.tree.map(
            lambda leaf: self.links.pulled(shares.astype(leaf.dtype), leaf), widened(tree)
        )

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        """V y: one exchange in place of a projection."""
        pulled = self._pulled(y, self._shares())
        return typed_like(jax.tree.map(jnp.add, widened(y), pulled), y)

    def tangent(self, v: PyTree) -> PyTree:
        return self.project(v)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.subtract, y, self.project(y))

    @property
    def apart(self) -> tuple[int, ...]:
        return (self.links.clients,)

    def settle(self, ahead: PyTree, correction: PyTree, scale: Array) -> tuple[PyTree, PyTree]:
        """v <- V v_hat, and r <- r + (v - v_hat) / scale.

        With a scale for each client every link has the larger one of its two ends,

            r_i <- r_i + sum_j V_ij (v_hat_j - v_hat_i) / max(scale_i, scale_j),
            v_i = v_hat_i + scale_i (r_i new - r_i old),

        which keeps sum r = 0 and the fixed points. (It is NIDS, Li, Shi and Yan 2019, with steps of
        each client's own; I less the matrix of the second line has no negative eigenvalue, as V.)
        """
        shares = self._shares()
        if jnp.ndim(scale):
            ends = self.links.ends
            shares = shares / jnp.maximum(scale[ends[0]], scale[ends[1]])
        pulled = self._pulled(ahead, shares)

        def moved(leaf: Array, pull: Array) -> Array:
            return leaf + (beside(scale, leaf) * pull if jnp.ndim(scale) else pull)

        def corrected(leaf: Array, pull: Array) -> Array:
            return leaf + (pull if jnp.ndim(scale) else pull / scale.astype(pull.dtype))

        new = jax.tree.map(moved, widened(ahead), pulled)
        kept = jax.tree.map(corrected, widened(correction), pulled)
        return typed_like(new, ahead), typed_like(kept, correction)

    def track(self, values: PyTree, correction: PyTree) -> tuple[PyTree, PyTree]:
        """What each client knows of the mean of values that change from round to round.

        t <- V (values - s), s <- values - t: gradient tracking, in which sum s = 0.
        """
        known = jax.tree.map(jnp.subtract, values, correction)
        pulled = typed_like(self._pulled(known, self._shares()), values)
        tracked = jax.tree.map(jnp.add, known, pulled)
        return tracked, jax.tree.map(jnp.subtract, correction, pulled)

    def heard(self, values: Array) -> Array:
        working = self._working()
        if working is None:
            working = jnp.ones(self.links.count, bool)
        return self.links.highest(working, values)
