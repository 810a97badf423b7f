"""Optimisers for x that Optax does not have."""

import functools

import jax.numpy as jnp
import optax

from aipod.stepsize import check_positive


def fading_adam(lr: float = 2e-3, fade: float = 500.0) -> optax.GradientTransformation:
    """Adam whose steps fade as 1 / sqrt(k), with a short memory of the direction (b1 = 0.5).

    The optimiser that E3-AiPOD takes unless told otherwise. Steps of a constant size let the
    features of a network grow without end; the curvature-safe steps on y then become too short.

    **Arguments:**

    - `lr`: the first step size.
    - `fade`: step k has the size lr / sqrt(1 + k / fade).

    !!! example
        ```python
        solver = aipod.E3AiPOD(upper_optimizer=aipod.fading_adam(0.001))
        ```
    """
    check_positive(lr, "fading_adam: lr, the step size or rate")
    check_positive(fade, "fading_adam: fade")
    return _fading_adam(float(lr), float(fade))


# One object for each pair of arguments: solvers made with it are equal.
@functools.cache
def _fading_adam(lr: float, fade: float) -> optax.GradientTransformation:
    return optax.adam(lambda k: lr / jnp.sqrt(1 + k / fade), b1=0.5, b2=0.999)
