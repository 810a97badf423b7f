"""The projection that ends some steps of ProxSkip, and its correction; with or without bounds."""

from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.sets import AbstractSet
from aipod.slots._compression import told


class Met(NamedTuple):
    """What the projections of a loop met on a set with bounds.

    - `multipliers`: of the bounds, summed over the projections.
    - `point`: where clients agree, the last point that they agreed on; else None.
    - `shared`: there the part s of the correction that all clients have; else None.

    The correction of client m is r_m + s. The r_m sum to zero, as without bounds, also where some
    of the clients are absent; s is what the bounds push back, and every client knows it.
    """

    multipliers: PyTree
    point: PyTree = None
    shared: PyTree = None

    def whole(self, correction: PyTree) -> PyTree:
        """r_m + s."""
        return with_shared(correction, self.shared)


def with_shared(correction: PyTree, shared: PyTree | None) -> PyTree:
    """r_m + s for every client m; r where nothing is shared."""
    if shared is None:
        return correction
    return jax.tree.map(lambda own, common: own + common[None], correction, shared)


def settle(
    constraint: AbstractSet,
    ahead: PyTree,
    correction: PyTree,
    known: PyTree | None = None,
    *,
    lr: Array,
    probability: float | Array,
    compression: str | None = None,
    key: PRNGKeyArray,
    begun: PyTree = None,
) -> tuple[PyTree, PyTree, PyTree | None]:
    """Projects v_hat (`ahead`) and updates the correction.

    With `compression`, messages are rounded, and `known` is what the server knows of each client,
    before and after. The client replaces v_hat by the value that the server decoded, so that the
    corrections still add up to zero.

    Where clients may be absent nothing is known of them, and `begun` is where the local steps of
    all began: a client sends how far its own have led it. With everyone present, by plain averages
    and with a step size that stays, that is the same; but what is known of a client that was absent
    for long is far from what it says next, and the rounding error with it.
    """
    chosen = constraint.for_round(key)
    if chosen.apart:
        # Without a server the corrections of neighbours do not cancel: nothing is subtracted.
        return *chosen.settle(ahead, correction, lr / probability), known
    offset = optax.tree.scale(lr / probability, correction)
    if compression is not None and known is None:
        ahead = cast_like(told(ahead, begun, compression), ahead)
    elif compression is not None:
        known = told(optax.tree.sub(ahead, offset), known, compression)
        ahead = cast_like(optax.tree.add(known, offset), ahead)
    new = cast_like(chosen.project_corrected(ahead, offset), ahead)
    corrected = axpy(correction, probability / lr, optax.tree.sub(new, ahead))
    return new, chosen.keep_absent(corrected, correction), known


def land(
    constraint: AbstractSet,
    ahead: PyTree,
    correction: PyTree,
    met: Met,
    known: PyTree | None = None,
    *,
    lr: Array,
    probability: float | Array,
    compression: str | None = None,
    key: PRNGKeyArray,
    begun: PyTree = None,
) -> tuple[PyTree, PyTree, Met, PyTree | None]:
    """`settle` on a set with bounds, whose multipliers are added to those met so far.

    Where clients agree, they first settle on their mean, as they do without bounds. That mean is
    then projected as the point of a single client is, whose correction is s.
    """
    shared, scale = met.shared, probability / lr
    if constraint.agreement is None:
        new, correction, pushed = _landed(constraint, ahead, correction, lr / probability)
        return new, correction, Met(axpy(met.multipliers, scale, pushed)), known
    mean, correction, known = settle(
        constraint.agreement,
        ahead,
        correction,
        known,
        lr=lr,
        probability=probability,
        compression=compression,
        key=key,
        begun=begun,
    )
    one = constraint.single(mean)
    point, shared, pushed = _landed(constraint.of_one, one, shared, lr / probability)
    multipliers = axpy(met.multipliers, scale, pushed)
    return constraint.for_all(point, ahead), correction, Met(multipliers, point, shared), known


def _landed(
    constraint: AbstractSet, ahead: PyTree, correction: PyTree, length: Array
) -> tuple[PyTree, PyTree, PyTree]:
    """project(v_hat - length r), r after it, and the multipliers of the bounds, times length."""
    landed, pushed = constraint.land(axpy(ahead, -1, optax.tree.scale(length, correction)))
    new = cast_like(landed, ahead)
    return new, axpy(correction, 1 / length, optax.tree.sub(new, ahead)), pushed
