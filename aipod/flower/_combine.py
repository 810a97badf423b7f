"""Combines what the clients send into what all of them get."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from aipod.flower._mailbox import DIRECTION, LARGEST, POINT, TOTAL

Kind = TypeVar("Kind", bound=Hashable)


def combine(
    asked: Mapping[int, Mapping[str, np.ndarray]], weights: Mapping[int, float], clients: int
) -> dict[str, np.ndarray]:
    """Answers by `table.row`, from the questions `table.row.kind` of the clients that are present.

    This is a round of the simulation in which some clients are absent. Points are averaged with the
    weights of those present, so that a point on which all agree stays where it is; averages of
    directions are unbiased for the mean over all clients.

    **Arguments:**

    - `asked`: the questions of each client that is present.
    - `weights`: of all known clients; an unknown client counts like their mean.
    - `clients`: how many clients there are in all.
    """
    names = {index: tuple(sorted(questions)) for index, questions in asked.items()}
    if len(set(names.values())) > 1:
        raise ValueError(
            "the clients ask for different things at the same step: do all of them have the same "
            f"solver and the same versions of aipod and JAX? They ask {names}."
        )
    present = sorted(asked)
    own = np.array([weights[index] for index in present], float)
    # The weights of a whole federation add up to 1.
    every = sum(weights[index] for index in sorted(weights)) * clients / len(weights)
    return {
        name.rpartition(".")[0]: _combined(
            int(name.rpartition(".")[2]),
            np.stack([asked[index][name] for index in present]),
            own / own.sum(),
            own / every * clients / len(present),
        )
        for name in names[present[0]]
    }


def _combined(
    kind: int, values: np.ndarray, of_present: np.ndarray, unbiased: np.ndarray
) -> np.ndarray:
    if values.dtype.kind != "f":
        raise ValueError(f"a client asks for the mean of {values.dtype}, which is not a real type.")
    wide = values.astype(np.float64)
    if kind == POINT:
        found = np.tensordot(of_present, wide, 1)
    elif kind == DIRECTION:
        found = np.tensordot(unbiased, wide, 1)
    elif kind == LARGEST:
        found = wide.max(axis=0)
    elif kind == TOTAL:
        found = wide.sum(axis=0)
    else:
        raise ValueError(f"a client asks a question of the unknown kind {kind}.")
    return found.astype(values.dtype)


def majority(found: Iterable[Kind], prefer: Callable[[Kind], Any]) -> Kind | None:
    """What occurs most often; of several such, the one that `prefer` puts last in order."""
    counts = Counter(found)
    return max(counts, key=lambda kind: (counts[kind], prefer(kind)), default=None)


def mean_of(
    found: Sequence[Mapping[str, np.ndarray]], weights: Sequence[float]
) -> dict[str, np.ndarray]:
    """Leaf by leaf the weighted mean of what should agree; whole numbers as most have them."""
    shares = np.asarray(weights, float) / np.sum(weights)
    means = {}
    for name, first in found[0].items():
        values = [one[name] for one in found]
        if first.dtype.kind == "f":
            mean = np.tensordot(shares, np.stack(values).astype(float), 1)
            means[name] = mean.astype(first.dtype)
        else:
            # One client alone must not change the counts and steps of all.
            (common, _), *_ = Counter(value.tobytes() for value in values).most_common(1)
            means[name] = np.frombuffer(common, first.dtype).reshape(first.shape)
    return means
