"""What the server of a run works with: its terms, the post, and what it must remember."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from aipod.flower._parcel import Parcel
from aipod.sets import AbstractAverage


class Post(Protocol):
    """Carries parcels to clients and back."""

    def nodes(self) -> Iterable[int]:
        """The nodes that can be reached now."""

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> dict[int, str]:
        """Sends each node its parcel, which expires after so many seconds; a ticket per node."""

    def collect(self, tickets: Iterable[str]) -> dict[str, Parcel | str]:
        """What has come back: for each ticket the reply, or a line about what went wrong."""


class NotEnoughClientsError(RuntimeError):
    """There were too few clients for longer than the run may wait; everything is saved."""


class DivergedError(RuntimeError):
    """The clients' iterates became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """The settings of a run.

    - `steps`, `every`, `seed`: as for `aipod run`.
    - `min_nodes`: with fewer clients a round waits; None for all of them.
    - `round_timeout`: seconds after which a client counts as absent.
    - `wait`: seconds to wait for enough clients before the run stops.
    - `clients`: how many clients there are; None to believe what most of them say.
    - `weights`: of the clients, in the order of their indices; None to believe each of them.
    - `weight_ratio`: a client is refused if its weight is more than this many times the median.
    - `nodes`: the id of each client's node, in the order of their indices; None to believe them.
    - `average`: a robust average in place of the mean.
    - `cut`: messages may be so many times as far from the others as the median one.
    - `secure`: whether the server asks for sums over clients that hide each client's vectors.
    - `poll`: seconds between two looks at the post.
    """

    steps: int
    every: int = 1
    seed: int = 0
    min_nodes: int | None = None
    round_timeout: float = 300.0
    wait: float = 600.0
    clients: int | None = None
    weights: tuple[float, ...] | None = None
    weight_ratio: float = 10.0
    nodes: tuple[int, ...] | None = None
    average: AbstractAverage | None = None
    cut: float = 100.0
    secure: bool = False
    poll: float = 0.2

    def __post_init__(self) -> None:
        for name in ("steps", "every", "min_nodes", "clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("round_timeout", "wait", "poll"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, seconds, got {getattr(self, name)}.")
        if not 1 <= self.weight_ratio < float("inf"):
            raise ValueError(f"weight_ratio must be at least 1, got {self.weight_ratio}.")
        if self.secure and self.average is not None:
            raise ValueError(
                "a robust average needs to see every vector, which secure sums hide: leave average "
                "or secure out."
            )
        if not self.cut >= 1:
            raise ValueError(f"cut must be at least 1, got {self.cut}.")
        if self.nodes is not None:
            if len(set(self.nodes)) != len(self.nodes):
                raise ValueError(f"nodes must be different from each other, got {self.nodes}.")
            if self.clients not in (None, len(self.nodes)):
                raise ValueError(
                    f"there are {len(self.nodes)} nodes for {self.clients} clients: give one for "
                    "each client."
                )
        if self.weights is not None:
            if not all(0 < weight < float("inf") for weight in self.weights):
                raise ValueError(f"weights must be positive and finite, got {self.weights}.")
            if self.clients not in (None, len(self.weights)):
                raise ValueError(
                    f"there are {len(self.weights)} weights for {self.clients} clients: give one "
                    "for each client."
                )


@dataclasses.dataclass(frozen=True)
class Owed:
    """The averages of a step that a silent client was counted in, and may not know."""

    step: int
    exchange: int
    answers: dict[str, np.ndarray]


@dataclasses.dataclass
class Progress:
    """What the server must remember.

    - `step`, `answers`: the outer step of the newest answers, and all answers of that step.
    - `exchange`: how many sets of answers there were so far.
    - `rounds`: how many of them held vectors; the others held only numbers.
    - `clients`, `weights`: how many clients there are, and the weights of those that are known.
    - `owed`: for each client that dropped out, the averages it may have missed.
    - `counted`: the clients that took part since all corrections were zero.
    - `known`: with short messages, what is known of each client, by `table.row`.
    """

    run: str
    step: int = -1
    exchange: int = 0
    rounds: int = 0
    clients: int = 0
    answers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    owed: dict[int, Owed] = dataclasses.field(default_factory=dict)
    counted: set[int] = dataclasses.field(default_factory=set)
    known: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    weights: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a client says about itself.

    - `index`, `clients`, `weight`: which client it is, of how many, and how much it counts.
    - `step`, `exchange`: how far its own state is; -1 when it has none.
    - `key`: with secure sums, its public key.
    """

    node: int
    index: int
    clients: int
    weight: float
    step: int
    exchange: int
    key: bytes = b""
