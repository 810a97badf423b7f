"""What a step size may be, and its value at an outer step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod.stepsize._checks import as_number
from aipod.stepsize._curvature import Curvature

StepSize = float | Array | Callable[[Array], Array] | Curvature


def check_lr(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a step size."""
    if isinstance(value, Curvature | jax.core.Tracer):
        return
    if callable(value):
        _check_schedule(value, name)
        return
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be a number, an Optax schedule or aipod.Curvature(), got "
            f"{type(value).__name__}."
        )
    if not 0 < float(array) < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {float(array)}: try 0.01.")


def _check_schedule(schedule: Callable[[Array], Any], name: str) -> None:
    """Raises `ValueError` unless a schedule gives one number, not negative, at the first step."""
    wanted = f"{name} must be a schedule of the outer step, as Optax has them: step -> number"
    try:
        first = schedule(jnp.zeros((), jnp.int32))
    except Exception as error:
        raise ValueError(f"{wanted}, but it raised {type(error).__name__}: {error}") from error
    number = as_number(first, f"{wanted}, which at step 0")
    if number is not None and not 0 <= number < float("inf"):
        raise ValueError(f"{wanted}, but at step 0 it gives {number}.")


class Rates(eqx.Module):
    """Evaluates step sizes at one outer step: `rates(lr)` is a number, and `rates(None)` is 1.

    - `step`: the outer step, for schedules.
    - `curvature`: the estimate of the lower level's largest curvature, for `Curvature`.
    - `stiffer`: the estimate over that of the step before.
    - `damping`: what the Hessian lacks where the lower level has lost its curvature; else 0.
    - `uneven`: the estimate over the curvature of a usual batch.
    - `moves`: the last move of x and of y, and the y after it, from which an upper slot may find
        its own pace.
    - `start`, `estimation`, `direct`, `told`: as a turn has them.
    """

    step: Array
    curvature: Array | None
    moves: tuple[PyTree, PyTree, PyTree] | None = None
    stiffer: Array | float = 1.0
    damping: Array | float = 0.0
    uneven: Array | float = 1.0
    start: PyTree = None
    estimation: Any = None
    direct: PyTree = None
    told: PyTree = None

    def __call__(self, lr: StepSize | None) -> Array:
        if isinstance(lr, Curvature):
            return lr.value(self.curvature)
        if lr is None:
            return jnp.ones(())
        return jnp.asarray(lr(self.step) if callable(lr) else lr, float)


def smaller(name: str, lr: StepSize | None) -> str | None:
    """The argument `name` with half the step size, as advice; None where there is no step size."""
    if lr is None:
        return None
    if isinstance(lr, Curvature):
        return f"{name}={lr.halved()}"
    if callable(lr):
        return f"a schedule of half the size for {name}"
    return f"{name}={float(lr) / 2:.3g} (it was {float(lr):.3g})"


def adapts(lr: StepSize | None) -> bool:
    """Whether a step size follows the curvature by itself, or there is none to choose."""
    return lr is None or isinstance(lr, Curvature)
