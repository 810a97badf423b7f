"""How much Gaussian noise hides: epsilon of a series of releases, by the exact formula."""

import math

from scipy.special import log_ndtr


def delta_of(epsilon: float, mu: float) -> float:
    """The smallest delta with which a Gaussian release is (epsilon, delta)-private.

    Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu): Balle and Wang (ICML 2018),
    theorem 8. `mu` is the farthest that two messages can lie apart over the noise's standard
    deviation. A series of releases, each chosen after the ones before, is as private as one whose
    mu^2 is their sum (Dong, Roth and Su 2022, corollary 3.3).
    """
    if mu == 0:
        return 0.0
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(math.exp(first) * -math.expm1(min(second - first, 0.0)), 0.0)


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon with which a Gaussian release is (epsilon, delta)-private."""
    if delta_of(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
    # The upper end of the interval is returned, so that rounding errs on the safe side.
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, mu) > delta else (low, middle)
    return high
