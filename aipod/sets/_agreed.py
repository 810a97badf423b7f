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

    def _of_one(self, point: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[0], point)

    def _of_all(self, point: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.broadcast_to(a, b.shape).astype(b.dtype), point, like)

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        mean = self._of_one(self.base.project(y))
        return self._of_all(self.within.project(mean), y)

    def tangent(self, v: PyTree) -> PyTree:
        mean = self._of_one(self.base.tangent(v))
        return self._of_all(self.within.tangent(mean), v)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        if like is None:
            return self.within.anchor()
        return self._of_all(self.within.anchor(like=self._of_one(like)), like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.residual(y), self.within.residual(self._of_one(y))

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
        slope = self._of_one(self.base.tangent(correction))
        held = self.within.face(self._of_one(y), slope, step=step, previous=previous)
        return AgreedWithin(self.base, held)

    def holding(self, active: PyTree) -> AbstractSet:
        return AgreedWithin(self.base, self.within.holding(active))

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
        self.within.check(self._of_one(y), name=name)


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
