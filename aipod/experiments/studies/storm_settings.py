"""E-AiPOD and E2-AiPOD with a recursive momentum, to measure what it does to their exponents.

The paper leaves open whether momentum lowers their communication complexity. Each derivative is
estimated by STORM, and steps follow the rule of methods with such a momentum: with
t_k = 1 + k / m,

    alpha_k = c t_k^(-1/3),   beta_k and rho_k multiples of it,   a_k = t_k^(-2/3),
    p = q = t_K^(-1/6),   the root of beta_K's order

and T is constant: the drift of x between projections enters as (alpha T)^2, which may not exceed
the error K^(-2/3). The predicted exponents are then 1.5 for samples, 1.25 for lower projections and
1.5 for those of x. The adjoint goes on from the outer step before: STORM does not remove the noise
of a z that is drawn anew.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

import aipod
from aipod.algorithms import Alternating

# Outer steps from one projection of x to the next, E2-AiPOD.
_BETWEEN = 2


def _fading(first: float, power: float, unit: float) -> Callable[[Array], Array]:
    """first t_k^-power."""
    return lambda step: first * (1 + step / unit) ** -power


def with_storm(
    upper: float, ratio: float, unit: float
) -> tuple[Callable[[int], Alternating], Callable[[int], Alternating]]:
    """E-AiPOD and E2-AiPOD for runs of K steps.

    - `upper`: c.
    - `ratio`: beta and rho over alpha.
    - `unit`: m.
    """
    # Made once, so that runs of all K share a compiled program.
    alpha, beta = _fading(upper, 1 / 3, unit), _fading(ratio * upper, 1 / 3, unit)
    estimator = aipod.STORM(_fading(1.0, 2 / 3, unit))

    def lower(steps: int) -> tuple[Any, Any]:
        prob: Any = jnp.asarray((1 + steps / unit) ** (-1 / 6))
        return aipod.ProxSkip(lr=beta, steps=1, prob=prob), prob

    def skipping(steps: int) -> Alternating:
        return Alternating(
            lower=lower(steps)[0],
            adjoint=aipod.Neumann(2, beta, warm=True),
            upper=aipod.Delayed(lr=alpha),
            estimator=estimator,
        )

    def periodic(steps: int) -> Alternating:
        moves_y, prob = lower(steps)
        return Alternating(
            lower=moves_y,
            adjoint=aipod.ProxSkipAdjoint(steps=1, lr=beta, prob=prob, warm=True),
            upper=aipod.Periodic(steps=_BETWEEN, lr=alpha),
            estimator=estimator,
        )

    return skipping, periodic
