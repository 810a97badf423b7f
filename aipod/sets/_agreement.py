"""Agreement between clients: what all its forms, simulated or over a network, have in common."""

import equinox as eqx
import jax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.sets._geometry import zero_anchor
from aipod.sets._set import AbstractSet


class AbstractAgreement(AbstractSet):
    """All clients agree. The leading axis of every leaf of a point is the client axis."""

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return zero_anchor(like)

    @property
    def federated(self) -> bool:
        return True

    @property
    def per_client(self) -> bool:
        return True

    @property
    def together(self) -> bool:
        return True

    def pass_on(self, v: PyTree, key: PRNGKeyArray) -> PyTree:
        raise ValueError(
            f"{type(self).__name__} cannot hand a client's vector to another client, as "
            "aipod.FedMBO needs it: use aipod.Consensus() without weights, on one device, or "
            "another method, such as aipod.FedNest or aipod.E3AiPOD."
        )

    def directions(self) -> AbstractSet:
        # A linear subspace already.
        return self


class AbstractRound(AbstractSet):
    """An agreement, its `base`, as one round sees it; some of the clients may be absent."""

    base: eqx.AbstractVar[AbstractAgreement]

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        # The corrections of all clients average to zero, those of the present ones do not:
        # subtracting theirs would move even a solution.
        return self.project(y)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return self.base.anchor(x, like=like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.residual(y, x)


def permuted(v: PyTree, key: PRNGKeyArray) -> PyTree:
    """The rows of all leaves in one random order."""
    order = jax.random.permutation(key, jax.tree.leaves(v)[0].shape[0])
    return jax.tree.map(lambda leaf: leaf[order], v)


def beside(weights: Array, leaf: Array) -> Array:
    """One number for each client, shaped to multiply a leaf along its client axis."""
    return weights.reshape((-1,) + (1,) * (leaf.ndim - 1)).astype(leaf.dtype)


def bytes_of_one_client(y: PyTree) -> int:
    """The bytes of one client's part of a point."""
    return sum(leaf[0].nbytes for leaf in jax.tree.leaves(y))
