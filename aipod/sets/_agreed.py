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
    communication round; the second is the server's work, or that of every client by itself.

    **Arguments:**

    - `base`: the agreement, a `Consensus`.
    - `within`: the set of one client's point.

    !!! example
        ```python
        both = aipod.sets.AgreedWithin(aipod.Consensus(), aipod.Simplex())
        both.project(jnp.array([[1.0, 0.0], [1.0, 2.0]]))  # [[0.5, 0.5], [0.5, 0.5]]
        ```
    """

    base: AbstractSet
    within: AbstractSet

    def __check_init__(self) -> None:
        if self.base.apart:
            raise ValueError(
                "AgreedWithin needs one average of all clients, which gossip does not have: use "
                "aipod.Consensus() in place of aipod.Gossip, or leave the set of x out."
            )

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
        return AgreedWithin(self.base.for_round(key), self.within)

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
