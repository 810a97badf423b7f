"""What the server does against clients that lie in their numbers: cuts, and robust averages."""

from collections.abc import Callable, Mapping

import numpy as np

from aipod.sets import AbstractAverage, ClippedMean, GeometricMedian, TrimmedMean

# With fewer clients nobody can say which of them is far from the others.
_ENOUGH = 4
# How much of the typical distance of earlier exchanges still counts.
_MEMORY = 0.5

_KINDS: dict[str, tuple[Callable[..., AbstractAverage], str]] = {
    "trimmed-mean": (TrimmedMean, "share"),
    "geometric-median": (GeometricMedian, ""),
    "clipped-mean": (ClippedMean, "factor"),
}


def average_of(text: str) -> AbstractAverage | None:
    """The average that a run configuration names, such as `trimmed-mean:0.2`; None for `mean`."""
    name, _, number = text.strip().partition(":")
    if name in ("", "mean") and not number:
        return None
    if name not in _KINDS or (number and not _KINDS[name][1]):
        raise ValueError(
            f"run configuration: average must be mean, {', '.join(_KINDS)}, with a number as in "
            f"trimmed-mean:0.2 or clipped-mean:1, got {text!r}."
        )
    made, argument = _KINDS[name]
    try:
        return made(**({argument: float(number)} if number else {}))
    except ValueError as error:
        raise ValueError(f"run configuration: average {text!r}: {error}") from None


class Cuts:
    """Cuts messages that lie much farther from the middle than is usual.

    The middle is the median of each entry. A message may be `ratio` times as far from it as the
    median client is now, or was in earlier exchanges; beyond that it is cut to this distance.
    """

    def __init__(self, ratio: float, log: Callable[[str], None]) -> None:
        self._ratio, self._log = ratio, log
        self._usual: dict[str, float] = {}

    def __call__(
        self, asked: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[int, dict[str, np.ndarray]]:
        found = {index: dict(questions) for index, questions in asked.items()}
        if len(found) < _ENOUGH:
            return found
        for name in next(iter(found.values())):
            values = np.stack([one[name] for one in found.values()]).astype(float)
            middle = np.median(values, axis=0)
            distances = np.linalg.norm(values - middle, axis=1)
            # Clients that agree to the last digit must not be cut for one that does not.
            least = 1e-2 * float(np.linalg.norm(middle))
            usual = max(float(np.median(distances)), _MEMORY * self._usual.get(name, 0.0))
            self._usual[name] = usual
            bound: float = self._ratio * max(usual, least)
            for index, value, distance in zip(found, values, distances, strict=True):
                if distance > bound > 0:
                    cut = middle + (value - middle) * (bound / distance)
                    found[index][name] = cut.astype(found[index][name].dtype)
                    self._log(
                        f"client {index}: its {name} is {distance / bound * self._ratio:.3g} times "
                        f"as far from the others as is usual, and was cut to {self._ratio:g} times"
                    )
        return found
