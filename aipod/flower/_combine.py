"""Combines what the clients send into what all of them get."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from aipod.flower._mailbox import DIRECTION, LARGEST, POINT, TOTAL
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
            own / every * clients / len(present),
            average,
        )
        for name in names[present[0]]
    }


def _combined(
    kind: int,
    values: np.ndarray,
    of_present: np.ndarray,
    unbiased: np.ndarray,
    average: AbstractAverage | None,
) -> np.ndarray:
    if values.dtype.kind != "f":
        raise ValueError(f"a client asks for the mean of {values.dtype}, which is not a real type.")
    if kind not in (POINT, DIRECTION, LARGEST, TOTAL):
        raise ValueError(f"a client asks a question of the unknown kind {kind}.")
    if average is not None:
        return np.asarray(_robust(kind, values, of_present, average), values.dtype)
    wide = values.astype(np.float64)
    if kind == POINT:
        found = np.tensordot(of_present, wide, 1)
    elif kind == DIRECTION:
        found = np.tensordot(unbiased, wide, 1)
    elif kind == LARGEST:
        found = wide.max(axis=0)
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


def mean_of(
    found: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[float],
    own: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """What should agree, as most clients have it: one of them alone must not change it.

    Numbers are the median over clients, entry by entry, and whole numbers those of most. What a
    client's adjoint has seen is its own; of that the weighted mean is taken.
    """
    shares = np.asarray(weights, float) / np.sum(weights)
    means = {}
    for name, first in found[0].items():
        values = [one[name] for one in found]
        if first.dtype.kind == "f" and name in own:
            mean = np.tensordot(shares, np.stack(values).astype(float), 1)
            means[name] = mean.astype(first.dtype)
        elif first.dtype.kind == "f":
            means[name] = np.median(np.stack(values), axis=0).astype(first.dtype)
        else:
            (common, _), *_ = Counter(value.tobytes() for value in values).most_common(1)
            means[name] = np.frombuffer(common, first.dtype).reshape(first.shape)
    return means
