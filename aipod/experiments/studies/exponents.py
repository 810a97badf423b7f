"""Exponents from log-log fits, with confidence intervals."""

import dataclasses

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Exponent:
    """An exponent and its 95 % interval."""

    value: float
    low: float
    high: float


def fit(target: ArrayLike, cause: ArrayLike) -> Exponent:
    """Fits e in target ~ cause^e by least squares of the logarithms.

    The interval is Student's t interval from the residuals, which include both the noise of the
    points and their distance from a power law.
    """
    across, up = np.log(np.asarray(cause, float)), np.log(np.asarray(target, float))
    free = len(up) - 2
    if free < 1:
        raise ValueError(f"a fit with an interval needs at least 3 points, got {len(up)}.")
    line = scipy.stats.linregress(across, up)
    width = float(scipy.stats.t.ppf(0.975, free) * line.stderr)
    slope = float(line.slope)
    return Exponent(slope, slope - width, slope + width)


def cost_at(error: float, errors: np.ndarray, costs: np.ndarray) -> float | None:
    """Returns the cost at which decreasing errors reach `error`, or None if they do not.

    Interpolates linearly in the logarithms; before the first run it returns that run's cost.
    """
    reached = np.flatnonzero(errors <= error)
    if not len(reached):
        return None
    after = int(reached[0])
    if after == 0:
        return float(costs[0])
    pair = slice(after - 1, after + 1)
    across, up = -np.log(errors[pair]), np.log(costs[pair])
    return float(np.exp(np.interp(-np.log(error), across, up)))
