"""The paper's algorithms: AiPOD, E-AiPOD and E2-AiPOD."""

import dataclasses
from typing import Any, TypedDict, Unpack

import optax

from aipod.algorithms._alternating import Alternating
from aipod.algorithms._variants import variant_of
from aipod.slots.adjoint import AbstractAdjoint, Neumann, ProxSkipAdjoint, Restarted
from aipod.slots.estimators import EstimatorLike
from aipod.slots.lower import ProjectedSGD, ProxSkip
from aipod.slots.upper import Delayed, EveryStep, Periodic, paced_unless
from aipod.stepsize import Curvature, StepSize

# Terms of a series, or steps of the adjoint, in an outer step that nobody has said anything about.
_TERMS = 10


def _series(
    *,
    adjoint_steps: int | None = None,
    adjoint_lr: StepSize = Curvature(),
    adjoint_random: bool = False,
    damping: float = 0.0,
) -> Neumann:
    """The Neumann series of AiPOD and E-AiPOD, by their keywords."""
    warm = adjoint_steps is None and not adjoint_random
    steps = _TERMS if adjoint_steps is None else adjoint_steps
    return Neumann(steps, adjoint_lr, adjoint_random, damping, warm=warm)


class _Series(TypedDict, total=False):
    """The keywords of `_series`, for type checkers."""

    adjoint_steps: int | None
    adjoint_lr: StepSize
    adjoint_random: bool
    damping: float


@variant_of(_series)
def AiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    estimator: EstimatorLike | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
    **series: Unpack[_Series],
) -> Alternating:
    """AiPOD, the paper's algorithm `stoc-alg`: every step of both levels is projected.

    S projected SGD steps on y (`update-ys`), z by a Neumann series (`NS-wk`), then
    x <- project_x(x - alpha h_f) with h_f = grad_x f + w (`NS-hf`). The paper's series begins at 0
    in every outer step and has N terms, which must be as many as the lower level is badly
    conditioned. Where N is not given, it goes on from the z of the step before, by 10 terms.

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [eta = c~ / l_g1]: step sizes, each a
        number, an Optax schedule of the outer step or, for the last two, `aipod.Curvature()`.
    - `lower_steps` [S]: steps on y.
    - `adjoint_steps` [N]: terms of the paper's series; by default a series that goes on, see
        `warm` of `aipod.Neumann`.
    - `adjoint_random`: the paper's random number of factors in place of the sum.
    - `damping`: a Tikhonov term on the Hessian, for lower levels that are not convex.
    - `estimator`: how derivatives are estimated from minibatches, such as `aipod.SAGA()`; goes with
        the series that goes on.
    - `upper_optimizer`: an `optax.GradientTransformation` in place of `upper_lr`.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=0.01)
        ```
    """
    return Alternating(
        lower=ProjectedSGD(lr=lower_lr, steps=lower_steps),
        adjoint=_series(**series),
        upper=EveryStep(
            lr=upper_lr, optimizer=paced_unless(upper_lr, upper_optimizer), corrected=False
        ),
        estimator=estimator,
    )


@variant_of(_series)
def EAiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    lower_prob: float = 0.3,
    upper_steps: int = 1,
    extrapolation: float = 1.0,
    estimator: EstimatorLike | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
    **series: Unpack[_Series],
) -> Alternating:
    """E-AiPOD, the paper's algorithm `stoc-alg-skip`: most projections of y are skipped.

    The lower level is ProxSkip (`update-z` to `update-yz2`); w is found once and serves T upper
    steps without projection, then one projection scaled by delta (`11ab`, `delta-x`). With p = 1,
    T = 1 and delta = 1 this is AiPOD.

    **Arguments:** those of `AiPOD`, and

    - `lower_prob` [p]: how often y is projected.
    - `upper_steps` [T]: upper steps for one w and one projection.
    - `extrapolation` [delta]: how far to go towards the projected point, at least 1.
    - `upper_optimizer`: takes the place of `extrapolation`, and where T = 1 of `upper_lr` too.

    !!! example
        ```python
        solver = aipod.EAiPOD(upper_lr=0.02, lower_lr=0.01, lower_prob=0.3, upper_steps=2)
        ```
    """
    return Alternating(
        lower=ProxSkip(lr=lower_lr, steps=lower_steps, prob=lower_prob),
        adjoint=_series(**series),
        upper=Delayed(
            steps=upper_steps,
            delta=extrapolation,
            lr=upper_lr,
            optimizer=paced_unless(upper_lr, upper_optimizer),
        ),
        estimator=estimator,
    )


class _Skipping(TypedDict, total=False):
    """The keywords that E2-AiPOD has from E-AiPOD, for type checkers."""

    upper_lr: StepSize | None
    lower_lr: StepSize
    lower_steps: int
    lower_prob: float
    upper_steps: int
    estimator: EstimatorLike | None
    upper_optimizer: optax.GradientTransformation | None


@variant_of(EAiPOD, without=("extrapolation", "adjoint_random"))
def E2AiPOD(
    *,
    adjoint_steps: int | None = None,
    adjoint_lr: StepSize = Curvature(),
    adjoint_prob: float = 0.3,
    damping: float = 0.0,
    **shared: Unpack[_Skipping],
) -> Alternating:
    """E2-AiPOD, the paper's algorithm `stoc-alg-skip-WS`: the adjoint skips projections too.

    Lower level as in E-AiPOD; the adjoint is a second ProxSkip, started at 0 in every outer step
    (`update-hatlambda-WS` to `update-lz2-WS`); x is projected when k mod T = 0 (`WS-df`, `WS-x`).
    Where the number of its steps is not given, there are 10, and they go on from the step before.
    Only without coupling (h = 0).

    **Arguments:** those of `AiPOD` and `lower_prob` [p], and

    - `adjoint_lr` [rho], `adjoint_prob` [q]: the step of the adjoint, and how often it projects.
    - `upper_steps` [T]: outer steps from one projection of x to the next.

    !!! example
        ```python
        solver = aipod.E2AiPOD(upper_lr=0.02, lower_lr=0.01, lower_prob=0.3, adjoint_prob=0.3)
        ```
    """
    made: Any = EAiPOD(**shared)
    upper = made.upper
    steps = _TERMS if adjoint_steps is None else adjoint_steps
    cold = ProxSkipAdjoint(steps, adjoint_lr, adjoint_prob, warm=False, damping=damping)
    adjoint: AbstractAdjoint = cold
    if adjoint_steps is None:
        adjoint = Restarted(dataclasses.replace(cold, warm=True))
    return Alternating(
        lower=made.lower,
        adjoint=adjoint,
        upper=Periodic(steps=upper.steps, lr=upper.lr, optimizer=upper.optimizer),
        estimator=made.estimator,
    )
