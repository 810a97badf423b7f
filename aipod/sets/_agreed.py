"""Agreement between clients on a point of a set."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod.sets._set import AbstractSet
from aipod.sets._wrapped import AbstractWrapped


class AgreedWithin(AbstractWrapped):
    """All clients have the same point, and it lies in another set: a simplex or a box, say.

    A projection averages over the clients, and then projects the average. Only the first is a
    communication round; the second is the server's work, or that of every client by itself. In
    gossip each client projects what it has heard from its neighbours.

    **Arguments:**

    - `base`: the agreement, a `Consensus` or a `Gossip`.
    - `within`: the set of one client's point.

    !!! example
        ```python
        both = aipod.sets.AgreedWithin(aipod.Consensus(), aipod.Simplex())
        both.project(jnp.array([[1.0, 0.0], [1.0, 2.0]]))  # [[0.5, 0.5], [0.5, 0.5]]
        ```
    """

    base: AbstractSet
    within: AbstractSet

    @property
    def agreement(self) -> AbstractSet | None:
        return self.base

    @property
    def of_one(self) -> AbstractSet:
        return self.within

    def single(self, y: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[0], y)

    def for_all(self, point: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.broadcast_to(a, b.shape).astype(b.dtype), point, like)

    def alone(self, y: PyTree) -> PyTree:
        return self.for_all(self.within.project(self.single(y)), y)

    def averaged(self, v: PyTree) -> PyTree:
        return self.base.tangent(v)

    def _common(self, x: PyTree) -> PyTree:
        """x, which the set moves with, without the client axis; None for a set that does not.

        The mean, so that each client's row has its part in derivatives.
        """
        if x is None or not self.within.coupled:
            return None
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), x)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        mean = self.single(self.base.project(y))
        return self.for_all(self.within.project(mean, self._common(x)), y)

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        mean = self.single(self.base.project_corrected(y, correction))
        return self.for_all(self.within.project(mean), y)

    def tangent(self, v: PyTree) -> PyTree:
        mean = self.single(self.base.tangent(v))
        return self.for_all(self.within.tangent(mean), v)

    def cotangent(self, gradient: PyTree) -> PyTree:
        # Each client's row is the sum of all gradients, times its weight.
        rows = self.base.cotangent(gradient)
        return jax.vmap(self.within.cotangent)(rows) if self.affine else rows

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None:
            return self.within.anchor(self._common(x))
        found = self.within.anchor(self._common(x), like=self.single(like))
        return self.for_all(found, like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        beyond = self.within.residual(self.single(y), self._common(x))
        return self.base.residual(y), beyond

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        point = None if like is None else self.single(like)
        return self.within.emptiness(self._common(x), point)

    @property
    def coupled(self) -> bool:
        return self.within.coupled

    def at(self, x: PyTree) -> AbstractSet:
        if not self.coupled:
            return self
        return AgreedWithin(self.base, self.within.at(self._common(x)))

    @property
    def affine(self) -> bool:
        return self.within.affine

    def constraints(self, point: PyTree) -> tuple[int | None, int | None]:
        return None, None

    def example(self) -> PyTree | None:
        return None

    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> AbstractSet:
        slope, place = self.single(self.base.tangent(correction)), self._common(x)
        held = self.within.face(self.single(y), slope, place, step=step, previous=previous)
        return AgreedWithin(self.base, held)

    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]:
        mean = self.single(self.base.project(y))
        landed, multipliers = self.within.land(mean, self._common(x))
        return self.for_all(landed, y), multipliers

    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree:
        return self.within.sides(y, multipliers, self._common(x), previous=previous)

    def holding(self, active: PyTree) -> AbstractSet:
        return AgreedWithin(self.base, self.within.holding(active))

    def pin(self, y: PyTree, x: PyTree = None) -> PyTree:
        place = self._common(x)
        return jax.vmap(lambda row: self.within.pin(row, place))(y)

    def loose(self, v: PyTree) -> PyTree:
        return jax.vmap(self.within.loose)(v)

    def directions(self) -> AbstractSet:
        return AgreedWithin(self.base.directions(), self.within.directions())

    @property
    def active(self) -> PyTree:
        return self.within.active

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        base = self.base.for_round(key)
        return EachWithin(base, self.within) if self.apart else AgreedWithin(base, self.within)

    @property
    def apart(self) -> tuple[int, ...]:
        return self.base.apart

    def inside(self) -> AbstractSet:
        return AgreedWithin(self.base.inside(), self.within)

    def start(self, x0: PyTree) -> PyTree:
        return _each(self.within, x0) if self.apart else self.project(x0)

    def heard(self, values: Array) -> Array:
        return self.base.heard(values)

    def link_size(self, y: PyTree) -> int:
        return self.base.link_size(y)

    @property
    def messages(self) -> int:
        return self.base.messages

    def once(self, clients: int) -> AbstractSet | None:
        base = self.base.once(clients)
        return None if base is None else AgreedWithin(base, self.within)

    def cohort(
        self, chosen: Array, clients: int, members: int, axis: str | None = None
    ) -> AbstractSet:
        return AgreedWithin(self.base.cohort(chosen, clients, members, axis), self.within)

    def by_client(self) -> "AgreedWithin":
        """True for what has a row for each client."""
        none = jax.tree.map(lambda _: False, self)
        method = getattr(self.base, "by_client", None)
        return none if method is None else eqx.tree_at(lambda s: s.base, none, method())

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self.base.check(y, name=name)
        self.within.check(self.single(y), self._common(x), name=name)

    def check_corrections(self, y: PyTree, *, name: str = "set") -> None:
        self.base.check_corrections(y, name=name)


class EachWithin(AbstractWrapped):
    """One round of gossip, after which every client projects its own point on a set.

        z = V x_hat,   s <- s + (z - x_hat) / scale,   x = project(z)

    The correction is that of z, before the projection: this is exact diffusion for sums with a
    common set (Alghunaim, Yuan and Sayed, NeurIPS 2019), and it rests where all x agree and
    x = project(x - scale mean d).
    """

    base: AbstractSet
    within: AbstractSet

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return _each(self.within, self.base.project(y))

    def tangent(self, v: PyTree) -> PyTree:
        raise ValueError(
            "upper_set= and graph= go together with plain steps on x alone, every outer step: use "
            "aipod.E3AiPOD(upper_lr=...), or leave upper_set or graph out."
        )

    def track(self, values: PyTree, correction: PyTree) -> tuple[PyTree, PyTree]:
        return self.tangent(values), correction

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return jax.tree.map(jnp.subtract, y, self.project(y))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return self.within.anchor() if like is None else _each(self.within, like)

    @property
    def affine(self) -> bool:
        return self.within.affine

    @property
    def apart(self) -> tuple[int, ...]:
        return self.base.apart

    def settle(self, ahead: PyTree, correction: PyTree, scale: Array) -> tuple[PyTree, PyTree]:
        new, kept = self.base.settle(ahead, correction, scale)
        return _each(self.within, new), kept

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self.base.check(y, name=name)


def _each(within: AbstractSet, points: PyTree) -> PyTree:
    """Every client's point, projected."""
    found = jax.vmap(lambda point: within.project(point))(points)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), found, points)
