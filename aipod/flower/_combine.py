"""Combines what the clients send into what all of them get."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from aipod.flower._mailbox import DIRECTION, LARGEST, POINT, TOTAL, WEIGHTED
from aipod.sets import AbstractAverage

Kind = TypeVar("Kind", bound=Hashable)


def combine(
    asked: Mapping[int, Mapping[str, np.ndarray]],
    weights: Mapping[int, float],
    clients: int,
    average: AbstractAverage | None = None,
) -> dict[str, np.ndarray]:
    """Answers by `table.row`, from the questions `table.row.kind` of the clients that are present.

    This is a round of the simulation in which some clients are absent. Points are averaged with the
    weights of those present, so that a point on which all agree stays where it is; averages of
    directions are unbiased for the mean over all clients.

    **Arguments:**

    - `asked`: the questions of each client that is present.
    - `weights`: of all known clients; an unknown client counts like their mean.
    - `clients`: how many clients there are in all.
    - `average`: a robust one in place of the mean; it takes all numbers of those present.
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
            own / every * clients,
            average,
        )
        for name in names[present[0]]
    }


def _combined(
    kind: int,
    values: np.ndarray,
    of_present: np.ndarray,
    of_all: np.ndarray,
    average: AbstractAverage | None,
) -> np.ndarray:
    if values.dtype.kind != "f":
        raise ValueError(f"a client asks for the mean of {values.dtype}, which is not a real type.")
    if kind not in (POINT, DIRECTION, LARGEST, TOTAL, WEIGHTED):
        raise ValueError(f"a client asks a question of the unknown kind {kind}.")
    if average is not None:
        return np.asarray(_robust(kind, values, of_present, average), values.dtype)
    wide = values.astype(np.float64)
    if kind == POINT:
        found = np.tensordot(of_present, wide, 1)
    elif kind == DIRECTION:
        found = np.tensordot(of_all / len(of_all), wide, 1)
    elif kind == LARGEST:
        found = wide.max(axis=0)
    elif kind == WEIGHTED:
        found = np.tensordot(of_all, wide, 1)
    else:
        found = wide.sum(axis=0)
    return found.astype(values.dtype)


def _robust(kind: int, values: np.ndarray, shares: np.ndarray, average: AbstractAverage) -> Any:
    wide = jnp.asarray(values)
    if kind in (POINT, DIRECTION):
        return average(wide, jnp.asarray(shares, wide.dtype))
    one = average.largest if kind == LARGEST else average.total
    return jax.vmap(one, in_axes=1)(wide)


def majority(found: Iterable[Kind], prefer: Callable[[Kind], Any]) -> Kind | None:
    """What occurs most often; of several such, the one that `prefer` puts last in order."""
    counts = Counter(found)
    return max(counts, key=lambda kind: (counts[kind], prefer(kind)), default=None)


# How far two clients may be apart, relatively, that compute the same thing on different machines.
_ALIKE = 1e-4


def mean_of(
    found: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[float],
    robust: bool = False,
) -> dict[str, np.ndarray]:
    """One of several models or states, leaf by leaf.

    Where most clients have the same numbers, as after a round, it is theirs: one of them alone must
    not change it. Where all differ it is the weighted mean, with `robust` the median. Whole numbers
    are as most have them.
    """
    shares = np.asarray(weights, float) / np.sum(weights)
    means = {}
    for name, first in found[0].items():
        values = [one[name] for one in found]
        if first.dtype.kind != "f":
            (common, _), *_ = Counter(value.tobytes() for value in values).most_common(1)
            means[name] = np.frombuffer(common, first.dtype).reshape(first.shape)
            continue
        wide = np.stack(values).astype(float)
        middle = np.median(wide, axis=0)
        apart = np.abs(wide - middle).reshape(len(values), -1).max(axis=1, initial=0)
        alike = np.sum(apart <= _ALIKE * (1 + np.abs(middle).max(initial=0)))
        some_lie = len(values) / 2 < alike < len(values)
        mean = middle if robust or some_lie else np.tensordot(shares, wide, 1)
        means[name] = mean.astype(first.dtype)
    return means
