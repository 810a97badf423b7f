"""Objectives, and the two-part kind whose first part depends on x and the data alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from aipod.problem._samplers import precomputed

Objective = Callable[[PyTree, PyTree, Any], Array]


class AtX(NamedTuple):
    """An objective with x fixed, (y, batch) -> scalar, and the sampler of its batches."""

    objective: Callable[[PyTree, Any], Array]
    samples: Any


class Composite(eqx.Module):
    """An objective in two parts, head(features(x, batch), y, batch).

    While x is fixed, as in the lower loop, the features of the data are computed once and the
    loop runs the head alone.

    **Arguments:**

    - `features`: (x, batch) -> features, one for each example on the leading axis.
    - `head`: (features, y, batch) -> scalar.

    !!! example
        ```python
        lower = aipod.Composite(
            lambda x, batch: jnp.tanh(batch[0] @ x),
            lambda features, y, batch: jnp.mean((features @ y - batch[1]) ** 2),
        )
        ```
    """

    features: Callable[[PyTree, Any], PyTree]
    head: Callable[[PyTree, PyTree, Any], Array]

    def __call__(self, x: PyTree, y: PyTree, batch: Any) -> Array:
        return self.head(self.features(x, batch), y, batch)

    @property
    def takes_common(self) -> bool:
        return takes_common(self.features) and takes_common(self.head)

    def each(self, x: PyTree, y: PyTree, batch: Any) -> Array | None:
        """Of a federation, the value of each client; None where only their sum is known."""
        return client_values(self.head, self.features(x, batch), y, batch)

    def take(self, chosen: Array, members: int) -> "Composite":
        """Of a federation, for the chosen clients alone."""
        features: Any = self.features
        head: Any = self.head
        return Composite(features.take(chosen, members), head.take(chosen, members))

    def by_client(self) -> "Composite":
        """True for what has a row for each client."""
        return Composite(by_client(self.features), by_client(self.head))

    def at_fixed_x(self, x: PyTree, samples: Any, draws: int) -> AtX | None:
        """The head alone, on precomputed features; None where batches are cheaper than all data."""
        mapped = precomputed(samples, lambda batch: (self.features(x, batch), batch), draws)
        if mapped is None:
            return None
        return AtX(lambda y, batch: self.head(batch[0], y, batch[1]), mapped)


def takes_common(objective: Any) -> bool:
    """Whether an objective of a federation takes points that are kept once for all clients.

    The client axis of such a point has length 1. Then it also answers `take(chosen, members)`, the
    objective of the first `members` of the chosen clients; the others must not count.
    """
    return bool(getattr(objective, "takes_common", False))


def client_values(objective: Any, x: PyTree, y: PyTree, batch: Any) -> Array | None:
    """The value of each client, whose sum an objective is; None where it does not tell."""
    method = getattr(objective, "each", None)
    return None if method is None else method(x, y, batch)


def by_client(part: Any) -> Any:
    """For each leaf of an objective, a sampler or a set whether it has a row for each client."""
    method = getattr(part, "by_client", None)
    return jax.tree.map(lambda _: False, part) if method is None else method()


def at_fixed_x(objective: Objective, samples: Any, x: PyTree, draws: int) -> AtX:
    """The objective for a loop of `draws` batches in which x does not change."""
    method = getattr(objective, "at_fixed_x", None)
    found = None if method is None else method(x, samples, draws)
    return found or AtX(lambda y, batch: objective(x, y, batch), samples)


def rebuilt(
    objective: Any,
    plain: Callable[[Any], Objective],
    features: Callable[[Any], Any],
    head: Callable[[Any], Any],
) -> Objective:
    """Applies `plain` to an objective, or `features` and `head` to the parts of a `Composite`."""
    if isinstance(objective, Composite):
        return Composite(features(objective.features), head(objective.head))
    return plain(objective)
