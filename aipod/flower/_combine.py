"""From the clients' questions to the one answer that all of them get."""

from collections.abc import Mapping

import numpy as np

from aipod.flower._mailbox import DIRECTION, LARGEST, POINT, TOTAL


def combine(
    asked: Mapping[int, Mapping[str, np.ndarray]], weights: Mapping[int, float], clients: int
) -> dict[str, np.ndarray]:
    """The answers by `table.row`, to questions by `table.row.kind` of each client that is present.

    As in a round of the simulation in which some clients are absent: points are averaged with the
    weights of those present, so that where clients agree nothing moves; averages of directions
    are unbiased for the mean over all clients.

    **Arguments:**

    - `asked`: the questions of each client that is present.
    - `weights`: of all clients that are known; one that is not counts like their mean.
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
    every = sum(weights.values()) * clients / len(weights)
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
        raise ValueError(f"a client asks for the mean of {values.dtype}, which are no reals.")
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
