"""The terms of a client's privacy: how much leaves it, and when it stops."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from aipod.algorithms import Alternating
from aipod.flower._accounting import epsilon_of
from aipod.stepsize import adapts

# One exchange of E3-AiPOD holds three vectors: the gradient, y and u.
VECTORS = 3
# What a node's own configuration may ask for.
_CLIP, _NOISE, _BUDGET, _DELTA = (
    "privacy-clip",
    "privacy-noise",
    "privacy-epsilon",
    "privacy-delta",
)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What a client does to each of the three vectors of an exchange before they leave it.

    How far the vector lies from what all clients already know (the x, y or u at which the step
    began; for a gradient zero) is cut to the length `clip`; then fresh Gaussian noise of standard
    deviation `noise * clip` is added to every entry. Whatever a client's data are, one exchange
    then differs by at most 2 sqrt(3) clip from what it would be with any other data: `epsilon`
    counts that, for the client's whole data as one record.

    For `E3AiPOD` with fixed step sizes and a given damping: the numbers that find them would tell
    of the data too. With `SecureSums` the noise of all clients together has this size.

    **Arguments:**

    - `clip`: the longest change, in the norm of all entries.
    - `noise`: the standard deviation of the noise, in units of `clip`.
    - `budget`: the largest epsilon of all releases of a client together, over all its runs; it
        then refuses. None for no limit.
    - `delta`: the delta that belongs to the budget.

    !!! example
        ```python
        privacy = aipod.flower.Privacy(clip=0.1, noise=20.0, budget=8.0)
        privacy.epsilon(releases=100, delta=1e-5)
        ```
    """

    clip: float
    noise: float
    budget: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"Privacy: {name} must be positive, got {getattr(self, name)}.")
        if self.budget is not None and not 0 < self.budget < float("inf"):
            raise ValueError(f"Privacy: budget must be positive, an epsilon, got {self.budget}.")
        if not 0 < self.delta < 1:
            raise ValueError(f"Privacy: delta must be in (0, 1), got {self.delta}.")

    @property
    def mu(self) -> float:
        """The farthest that two exchanges can lie apart, in standard deviations of the noise."""
        return 2 * math.sqrt(VECTORS) / self.noise

    def epsilon(self, releases: int, delta: float = 1e-5) -> float:
        """What `releases` exchanges add up to: (epsilon, delta)-differential privacy of a client.

        Its whole data count as one record, against a server that sees every message and may ask
        for anything.
        """
        if releases < 1 or not 0 < delta < 1:
            raise ValueError(
                f"releases must be at least 1 and delta in (0, 1), got {releases} and {delta}."
            )
        return epsilon_of(math.sqrt(releases) * self.mu, delta)

    def check(self, solver: Alternating) -> None:
        """Raises `ValueError` unless everything that the solver's clients send is covered."""
        check_covered(solver, "privacy")


def check_covered(solver: Alternating, what: str) -> None:
    """Raises `ValueError` unless a solver's clients send three vectors and nothing else."""
    lower, adjoint = solver.lower, solver.adjoint
    if solver.wire is not None:
        raise ValueError(
            f"{what} needs whole vectors: leave compression out of the solver's arguments."
        )
    if solver.upper.needs_moves:
        raise ValueError(
            f"{what} needs upper_lr, or an upper_optimizer such as aipod.fading_adam(): the "
            "numbers that find the pace of x would be sent as they are."
        )
    if not (lower.deferred and adjoint.deferred and solver.upper.sends_direction):
        raise ValueError(f"{what} is for aipod.E3AiPOD alone: choose it, or leave {what} out.")
    if adapts(lower.lr) or adapts(adjoint.lr) or getattr(adjoint, "damping", None) is None:
        raise ValueError(
            f"{what} needs numbers for lower_lr, adjoint_lr and damping: those that are found from "
            "the data would be sent as they are."
        )


def with_floor(asked: Privacy | None, node: Mapping[str, Any]) -> Privacy | None:
    """What an app asks for, made stricter where the node's own configuration says so.

    **Arguments:**

    - `asked`: by the app, which may have it from the run configuration; None for no privacy.
    - `node`: the node configuration: `privacy-noise`, the least noise; `privacy-clip`, the largest
        clip; `privacy-epsilon` and `privacy-delta`, the largest budget.
    """
    floor = {name: _number(node, name) for name in (_CLIP, _NOISE, _BUDGET, _DELTA) if name in node}
    unknown = [name for name in node if str(name).startswith("privacy") and name not in floor]
    if unknown:
        raise ValueError(
            f"node configuration: {unknown[0]} means nothing here: use {_CLIP}, {_NOISE}, "
            f"{_BUDGET} and {_DELTA}."
        )
    if not floor:
        return asked
    if asked is None:
        if _CLIP not in floor or _NOISE not in floor:
            raise ValueError(
                "this node asks for privacy and the app has none: add privacy-clip and "
                "privacy-noise to the node configuration, or choose an app that has privacy."
            )
        asked = Privacy(floor[_CLIP], floor[_NOISE])
    budgets = [b for b in (asked.budget, floor.get(_BUDGET)) if b is not None]
    deltas = [asked.delta] if asked.budget is not None else []
    deltas += [floor[_DELTA]] if _DELTA in floor else []
    return Privacy(
        clip=min(asked.clip, floor.get(_CLIP, asked.clip)),
        noise=max(asked.noise, floor.get(_NOISE, asked.noise)),
        budget=min(budgets, default=None),
        # The smaller delta and the smaller budget together are stricter than either pair.
        delta=min(deltas, default=asked.delta),
    )


def _number(node: Mapping[str, Any], name: str) -> float:
    try:
        value = float(node[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"node configuration: {name} must be a positive number, got {node[name]!r}."
        )
    return value
