"""VR-AiPOD: E3-AiPOD for finite sums."""

import optax

from aipod.algorithms._alternating import Alternating
from aipod.slots.adjoint import OneRoundAdjoint
from aipod.slots.estimators import SAGA, EstimatorLike
from aipod.slots.lower import OneRound
from aipod.slots.upper import Delayed, paced_unless
from aipod.stepsize import Curvature, StepSize


def VRAiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(iterations=2),
    lower_steps: int = 2,
    adjoint_steps: int = 1,
    adjoint_lr: StepSize = Curvature(iterations=2),
    upper_steps: int = 1,
    estimator: EstimatorLike | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """VR-AiPOD, ours: E3-AiPOD with few steps and variance-reduced derivatives, for finite sums.

        y_hat <- y_hat - beta (d_y - r),            S times
        u_hat <- u_hat - rho (d_f + d_G u_hat - e), N times,   d_f = grad_y f found once
        x_t+1 = x_t - alpha (d_x(x_t) + w),         T times,   one projection of y, u and x

    where each d is the estimate of a derivative by SAGA's tables over fixed minibatches, with a
    weight of 0.7 on what is new in a minibatch: less noise, and so longer steps. On a finite sum it
    converges to the solution itself, linearly where F is strongly convex, with minibatches, one
    projection in an outer step, constraints at both levels and, in a federation, one round. One
    batch of f serves x_0 and u, so an outer step has S + N + T + 1 batches. The lower level must be
    convex.

    **Arguments:**

    - `upper_lr` [alpha]: the step of x, which a finite sum can keep constant; or
    - `upper_optimizer`: an `optax.GradientTransformation`. The default, `aipod.paced_adam()`, finds
        its pace from values of f on minibatches, whose noise no table removes: give `upper_lr` to
        get beyond it.
    - `lower_lr` [beta], `adjoint_lr` [rho]: step sizes. SAGA sees the curvature of minibatches, so
        choose at most a third of what full batches allow.
    - `lower_steps` [S], `adjoint_steps` [N]: local steps on y and on u.
    - `upper_steps` [T]: steps of x for one w. More than 1 saves samples where x is free; on a
        constrained x they leave an error of order alpha T.
    - `estimator`: another way to estimate derivatives; by default `aipod.SAGA(weight=0.7)`.

    !!! example
        ```python
        solver = aipod.VRAiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return Alternating(
        lower=OneRound(lr=lower_lr, steps=lower_steps),
        adjoint=OneRoundAdjoint(adjoint_steps, adjoint_lr),
        upper=Delayed(
            steps=upper_steps,
            lr=upper_lr,
            optimizer=paced_unless(upper_lr, upper_optimizer),
        ),
        estimator=SAGA(weight=0.7) if estimator is None else estimator,
        shared=True,
    )
