"""The totals of a run, and how counts become bytes and columns."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from aipod.algorithms import State
from aipod.problem import Bilevel
from aipod.slots import Counts, message_bytes


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The totals of a run: projections and samples of each kind, and in a federation what was sent.

    A round is an average that crosses clients; bytes are those that one client sends and gets. In
    gossip, without a server, a round is one exchange between all neighbours: `messages` counts what
    was sent along links, once for each direction, `bytes_per_link` the bytes that went over one
    link in both directions, and a client sends to each neighbour. Failing links are counted by
    their expected share.

    !!! example
        ```python
        solution.ledger.lower_projections, solution.ledger.samples
        ```
    """

    upper_projections: int = 0
    lower_projections: int = 0
    adjoint_projections: int = 0
    upper_samples: int = 0
    lower_samples: int = 0
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    messages: int = 0
    bytes_per_link: int = 0

    @property
    def projections(self) -> int:
        """Projections of all three kinds."""
        return sum(getattr(self, name) for name in PROJECTIONS)

    @property
    def samples(self) -> int:
        """Samples of both levels."""
        return sum(getattr(self, name) for name in SAMPLES)

    def asdict(self) -> dict[str, int]:
        return dataclasses.asdict(self) | {
            "projections": self.projections,
            "samples": self.samples,
        }


# The fields of a ledger are the one list from which every column of counts is derived.
FIELDS = tuple(field.name for field in dataclasses.fields(Ledger))
PROJECTIONS = tuple(name for name in FIELDS if name.endswith("_projections"))
SAMPLES = tuple(name for name in FIELDS if name.endswith("_samples"))
FEDERATED = tuple(name for name in FIELDS if name not in PROJECTIONS + SAMPLES)
LINKS = ("messages", "bytes_per_link")
# The columns that every history has; those of `FEDERATED` in a federation only, and those of
# `LINKS` only where clients gossip.
RECORDED = ("step", *PROJECTIONS, "samples", *SAMPLES, *FEDERATED)
_COUNTS = tuple(field.name for field in dataclasses.fields(Counts))


def _hollow(tree: PyTree, kind: str | None) -> PyTree:
    """Arrays that take no memory and whose rows have as many bytes as a message with `tree`."""

    def one(leaf: Any) -> np.ndarray:
        if kind is None:
            return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        clients, *shape = leaf.shape
        size = message_bytes(math.prod(shape), kind)
        return np.broadcast_to(np.zeros((), np.uint8), (clients, size))

    return jax.tree.map(one, tree)


@dataclasses.dataclass(frozen=True)
class Price:
    """The bytes of one client's x and y in a message; turns a chunk's counts into a ledger."""

    federated: bool
    x_up: int
    y_up: int
    x_down: int
    y_down: int
    x_link: int = 0
    y_link: int = 0
    messages: int = 0

    @staticmethod
    def of(problem: Bilevel, state: State, wire: str | None, back: str | None = None) -> "Price":
        """`wire`: the type of the numbers that a client sends; None for their own.

        `back`: that of the numbers of x that the server sends.
        """
        sets, trees = (problem.upper_set, problem.lower_set), (state.x, state.y)

        def sizes(*kinds: str | None) -> list[int]:
            hollow = [_hollow(problem.wide(tree), k) for tree, k in zip(trees, kinds, strict=True)]
            return [s.message_size(tree) for s, tree in zip(sets, hollow, strict=True)]

        down, up = sizes(back, None), sizes(wire, wire)
        x, y = (_hollow(problem.wide(tree), None) for tree in trees)
        return Price(
            any(s.federated for s in sets),
            *(up[0], up[1], down[0], down[1]),
            x_link=sets[0].link_size(x),
            y_link=sets[1].link_size(y),
            messages=max(s.messages for s in sets),
        )

    def _priced(self, counts: Mapping[str, Any], before: Ledger) -> dict[str, Any]:
        """Totals for each field of a ledger, from counts (numbers or columns) since `before`."""
        x, y = counts["sent_x"], counts["sent_y"]
        up, down = x * self.x_up + y * self.y_up, x * self.x_down + y * self.y_down
        spent = {**counts, "bytes_up": up, "bytes_down": down}
        spent["messages"] = counts["rounds"] * self.messages
        spent["bytes_per_link"] = x * self.x_link + y * self.y_link
        return {name: spent[name] + getattr(before, name) for name in FIELDS}

    def total(self, counts: Counts, before: Ledger) -> Ledger:
        """The ledger after a chunk."""
        numbers = {name: int(getattr(counts, name)) for name in _COUNTS}
        return Ledger(**self._priced(numbers, before))

    def rows(self, rows: Mapping[str, np.ndarray], before: Ledger) -> dict[str, np.ndarray]:
        """The recorded rows of a chunk as columns of the history, counts first."""
        totals = self._priced({name: rows[name].astype(np.int64) for name in _COUNTS}, before)
        totals["samples"] = sum(totals[name] for name in SAMPLES)
        totals["step"] = rows["step"].astype(np.int64)
        left_out: tuple[str, ...] = FEDERATED
        if self.federated:
            left_out = () if self.messages else LINKS
        kept = [name for name in RECORDED if name not in left_out]
        metrics = {k: v for k, v in rows.items() if k not in _COUNTS and k != "step"}
        return {name: totals[name] for name in kept} | metrics
