"""Step sizes: a number, an Optax schedule of the outer step, or the lower level's curvature."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


class Curvature(eqx.Module):
    """The step min(cap, safety / l_max), with l_max the largest curvature of the lower objective.

    l_max is the largest eigenvalue (in size) of grad_yy g on the current minibatch, found by
    `iterations` power iterations per outer step, each started from the vector of the step before.
    The Hessian is not projected, since the skipped steps of ProxSkip are not.

    In a federation every client iterates with its own Hessian and the step follows the largest of
    them. That maximum, one number, comes with a round that is sent anyway, and so is the one of
    the outer step before; only the very first is found before the first step.

    **Arguments:**

    - `safety`: a factor on the step; below 1 is more careful.
    - `cap`: the longest step, for flat problems.
    - `iterations`: power iterations per outer step.
    - `tempered`: in the lower level of E3-AiPOD, `ProxSkip(prob=None)`, take shorter steps where
        the local ones undo each other, that is where they follow noise. Nothing changes elsewhere.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=aipod.Curvature(safety=0.5))
        ```
    """

    safety: float = 1.0
    cap: float = 1.0
    iterations: int = eqx.field(static=True, default=4)
    tempered: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        for name in ("safety", "cap"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"Curvature: {name} must be positive, got {value}.")
        check_steps(self.iterations, "Curvature: iterations")


StepSize = float | Array | Callable[[Array], Array] | Curvature


def check_rate(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a step size."""
    if isinstance(value, Curvature) or callable(value) or isinstance(value, jax.core.Tracer):
        return
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be a number, an Optax schedule or aipod.Curvature(), got "
            f"{type(value).__name__}."
        )
    if not 0 < float(array) < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {float(array)}: try 0.01.")


def check_steps(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}.")


class Rates(eqx.Module):
    """What step sizes may depend on at one outer step; called on one, it gives the number.

    None stands for 1.
    """

    step: Array
    curvature: Array | None

    def __call__(self, rate: StepSize | None) -> Array:
        if isinstance(rate, Curvature):
            if self.curvature is None:
                raise ValueError("a Curvature step size needs an estimate of the curvature.")
            tiny = jnp.finfo(self.curvature.dtype).tiny
            return jnp.minimum(rate.cap, rate.safety / jnp.maximum(self.curvature, tiny))
        if rate is None:
            return jnp.ones(())
        return jnp.asarray(rate(self.step) if callable(rate) else rate, float)


def theory(
    steps: int,
    rule: str,
    *,
    upper: float = 1.0,
    ratio: float = 1.0,
    probability: float = 1.0,
    adjoint: float = 1.0,
    upper_steps: int | None = None,
    terms: float = 1.0,
    longest: float = 1.0,
) -> dict[str, Any]:
    """The paper's choices for a run of K outer steps, as arguments of the solver it is about.

    The theorems fix how each argument scales with K and leave the constants open; the constants
    are arguments here. `rule` is the LaTeX label of the statement:

    - `"thm"` (AiPOD): alpha = upper / sqrt(K), beta = ratio alpha, N = terms log K.
    - `"redu-LL"` (E-AiPOD): alpha = upper / (T sqrt(K)), delta = 1, beta = ratio alpha T,
        p = probability sqrt(beta), N = terms log(1 / alpha).
    - `"redu-UL"` (E-AiPOD): the same with delta = sqrt(T). It asks for lower batches T times as
        large, which is for the caller to give.
    - `"cor-E2"` (E2-AiPOD): alpha = upper / sqrt(K), beta = ratio alpha, rho = adjoint / sqrt(K),
        p = q = probability K^(-1/4), T = K^(1/4), N = terms log K. With rho this small N steps
        from zero leave most of the adjoint unsolved; the paper's own proof takes N = O(1 / alpha).

    **Arguments:**

    - `steps` [K]: outer steps.
    - `rule`: which statement.
    - `upper` [alpha bar], `ratio` [beta / (alpha T)], `probability`, `adjoint`, `terms`: constants.
    - `upper_steps` [T]: default 1, and for `"cor-E2"` K^(1/4).
    - `longest`: no step is longer; 1 / l_g1 for beta and rho.

    !!! example
        ```python
        solver = aipod.EAiPOD(**aipod.stepsize.theory(10_000, "redu-LL", upper_steps=2))
        ```
    """
    check_steps(steps, "steps (K)")
    if rule not in ("thm", "redu-LL", "redu-UL", "cor-E2"):
        raise ValueError(
            f'rule must be "thm", "redu-LL", "redu-UL" or "cor-E2", the paper\'s labels, got '
            f"{rule!r}."
        )
    root = math.sqrt(steps)
    if rule == "cor-E2":
        count = upper_steps or max(1, round(steps**0.25))
        alpha = min(longest, upper / root)
        chance = min(1.0, probability / steps**0.25)
        return {
            "upper_lr": alpha,
            "lower_lr": min(longest, ratio * alpha),
            "adjoint_lr": min(longest, adjoint / root),
            "lower_prob": chance,
            "adjoint_prob": chance,
            "upper_steps": count,
            "adjoint_steps": max(1, math.ceil(terms * math.log(steps))),
        }
    count = upper_steps or 1
    alpha = min(longest, upper / (count * root))
    beta = min(longest, ratio * alpha * count)
    series = {"adjoint_steps": max(1, math.ceil(terms * math.log(max(1 / alpha, steps))))}
    if rule == "thm":
        if count != 1:
            raise ValueError('upper_steps belongs to E-AiPOD: use the rule "redu-LL" or "redu-UL".')
        return {"upper_lr": alpha, "lower_lr": beta} | series
    return {
        "upper_lr": alpha,
        "lower_lr": beta,
        "lower_prob": min(1.0, probability * math.sqrt(beta)),
        "upper_steps": count,
        "extrapolation": math.sqrt(count) if rule == "redu-UL" else 1.0,
    } | series
