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
    """The e of target ~ cause^e: least squares of the logarithms.

    The interval is that of Student's t for the residuals of the fit, which hold the noise of the
    points as well as how far they are from a power law.
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
    """The cost at which errors that fall from run to run reach `error`; None if they do not.

    Between two runs by a straight line in the logarithms; costs before the first run are those of
    the first run.
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
