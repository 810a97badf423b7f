"""Methods of others for finite sums and streams: estimators that remember, in the slots of SOBA.

One step of y, z and x at once, on one batch i of the lower level and one batch j of the upper. With

    D_y = grad_y g_i(x, y),   D_z = grad_yy g_i(x, y) z - grad_y f_j(x, y),
    D_x = grad_x f_j(x, y) - grad_xy g_i(x, y) z

they differ in how these three are estimated; then y <- y - beta D_y, z <- z - rho D_z and
x <- x - alpha D_x.
"""

import dataclasses
from typing import Any

from aipod.algorithms._alternating import Alternating
from aipod.algorithms._paper import AiPOD
from aipod.algorithms._table1 import SOBA
from aipod.algorithms._variants import variant_of
from aipod.problem import Scope
from aipod.slots.estimators import (
    SAGA,
    SARAH,
    STORM,
    AbstractEstimator,
    EstimatorLike,
    Estimators,
    HeavyBall,
    LooplessSVRG,
)
from aipod.stepsize import StepSize

_CHOSEN = ("shared", "estimator")


def _soba(name: str, estimator: EstimatorLike, arguments: Any) -> Alternating:
    made = SOBA(**arguments, shared=True, estimator=estimator)
    return dataclasses.replace(made, scope=Scope(name, upper=False, lower=False))


@variant_of(SOBA, without=_CHOSEN)
def SABA(**arguments: Any) -> Alternating:
    """SABA (Dagreou, Ablin, Vaiter and Moreau, NeurIPS 2022): SOBA with tables.

        d = g_i - T_i + mean(T),   T_i <- g_i   for each of the five derivatives in D_y, D_z, D_x

    by `aipod.SAGA`, on fixed minibatches. Its rule: alpha, beta and rho constant; on a finite sum
    whose F is strongly convex or a gradient-dominated function it converges linearly, with one
    minibatch of each level in a step. Takes no constraint.

    **Arguments:** those of `aipod.SOBA` but for `shared` and `estimator`.

    !!! example
        ```python
        solver = aipod.SABA(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return _soba("SABA", SAGA(), arguments)


@variant_of(SOBA, without=_CHOSEN)
def SRBA(*, period: int | None = None, **arguments: Any) -> Alternating:
    """SRBA (Dagreou, Moreau, Vaiter and Ablin, AISTATS 2024): recursive estimates of all three.

        D <- the derivatives on all data                          every q-th step
        D <- D + D_ij(x, y, z) - D_ij(x_last, y_last, z_last)     else

    by `aipod.SARAH`. Its rule: alpha, beta and rho constant, q of the order of the number of
    minibatches; it reaches the lower bound of its paper for finite sums. Takes no constraint.

    **Arguments:** those of `aipod.SOBA` but for `shared` and `estimator`, and

    - `period` [q]: steps from one pass over all data to the next; by default an epoch.

    !!! example
        ```python
        solver = aipod.SRBA(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return _soba("SRBA", SARAH(period), arguments)


@variant_of(SOBA, without=_CHOSEN)
def SVRB(*, prob: float | None = None, **arguments: Any) -> Alternating:
    """SOBA with the full derivatives at an anchor, as SVRG has them, without an inner loop.

        D = D_ij(x, y, z) - D_ij(anchor) + D(anchor),   the anchor moves with probability p

    by `aipod.LooplessSVRG`. Takes no constraint.

    **Arguments:** those of `aipod.SOBA` but for `shared` and `estimator`, and

    - `prob` [p]: how often the anchor moves; by default once in an epoch on average.

    !!! example
        ```python
        solver = aipod.SVRB(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return _soba("SVRB", LooplessSVRG(prob), arguments)


@variant_of(SOBA, without=_CHOSEN)
def MASOBA(*, momentum: StepSize = 0.1, **arguments: Any) -> Alternating:
    """MA-SOBA (Chen, Xiao and Balasubramanian, 2023): SOBA with an average of D_x.

        h <- (1 - theta) h + theta D_x,   x <- x - alpha h

    by `aipod.HeavyBall`; y and z follow plain minibatches. Its rule: alpha, beta, rho and theta
    all O(1 / sqrt(K)). Takes no constraint.

    **Arguments:** those of `aipod.SOBA` but for `shared` and `estimator`, and

    - `momentum` [theta]: the weight of the newest derivative, a number or an Optax schedule.

    !!! example
        ```python
        solver = aipod.MASOBA(upper_lr=0.02, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return _soba("MA-SOBA", Estimators(upper=HeavyBall(momentum)), arguments)


@variant_of(SOBA, without=_CHOSEN)
def FSLA(*, momentum: StepSize = 0.1, **arguments: Any) -> Alternating:
    """FSLA (Li, Gu and Huang, AAAI 2022): SOBA with a recursive momentum of D_x.

        h <- D_x + (1 - a) (h - D_x(x_last, y_last, z_last) on the same batches),   x <- x - alpha h

    by `aipod.STORM`; y and z follow plain minibatches. Its rule: alpha, beta, rho and a all
    O(1 / sqrt(K)). Takes no constraint.

    **Arguments:** those of `aipod.SOBA` but for `shared` and `estimator`, and

    - `momentum` [a]: the weight of the newest derivative, a number or an Optax schedule.

    !!! example
        ```python
        solver = aipod.FSLA(upper_lr=0.02, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return _soba("FSLA", Estimators(upper=STORM(momentum)), arguments)


def _recursive(
    name: str, estimator: AbstractEstimator, steps: int, terms: int, arguments: Any
) -> Alternating:
    """z by a Neumann series of plain minibatches, y and x with estimators."""
    both = Estimators(lower=estimator, upper=estimator)
    made = AiPOD(lower_steps=steps, adjoint_steps=terms, estimator=both, **arguments)
    return dataclasses.replace(made, scope=Scope(name, upper=False, lower=False))


@variant_of(AiPOD, without=("lower_steps", "estimator"))
def SUSTAIN(*, adjoint_steps: int = 10, momentum: StepSize = 0.1, **arguments: Any) -> Alternating:
    """SUSTAIN (Khanduri et al., NeurIPS 2021): a recursive momentum for y and for x.

        v <- grad_y g_i(x, y) + (1 - a) (v - grad_y g_i(x_last, y_last)),   y <- y - beta v
        z by a Neumann series,   h <- D_x + (1 - a) (h - D_x at the last point),   x <- x - alpha h

    by `aipod.STORM`. Its rule: alpha and beta O(K^(-1/3)), a = O(alpha^2). In the paper the series
    at the last point is repeated on the samples of the new one; here each z stays as it was found.
    Takes no constraint.

    **Arguments:** those of `aipod.AiPOD` but for `lower_steps`, which is 1, and

    - `momentum` [a]: the weight of the newest derivative, a number or an Optax schedule.

    !!! example
        ```python
        solver = aipod.SUSTAIN(upper_lr=0.02, lower_lr=0.1)
        ```
    """
    return _recursive("SUSTAIN", STORM(momentum), 1, adjoint_steps, arguments)


@variant_of(SUSTAIN)
def MRBO(**arguments: Any) -> Alternating:
    """MRBO (Yang, Ji and Liang, NeurIPS 2021): the same recursion as SUSTAIN, found independently.

        v and h as in `SUSTAIN`,   y <- y - beta v,   x <- x - alpha h

    Its rule: alpha and beta are constants times eta_k = O((m + k)^(-1/3)), a = O(eta_k^2). It
    samples each factor of the Neumann series anew, as `aipod.Neumann` does. Takes no constraint.

    **Arguments:** those of `SUSTAIN`.

    !!! example
        ```python
        solver = aipod.MRBO(upper_lr=0.02, lower_lr=0.1)
        ```
    """
    made = SUSTAIN(**arguments)
    return dataclasses.replace(made, scope=Scope("MRBO", upper=False, lower=False))


@variant_of(AiPOD, without=("estimator",))
def VRBO(
    *,
    lower_steps: int = 5,
    adjoint_steps: int = 10,
    period: int | None = None,
    **arguments: Any,
) -> Alternating:
    """VRBO (Yang, Ji and Liang, NeurIPS 2021): SPIDER for y and for x, with an inner loop on y.

        v <- grad_y g on all data every q-th time, else v + grad_y g_i(new) - grad_y g_i(last)
        y <- y - beta v   S times,   z by a Neumann series,   h likewise,   x <- x - alpha h

    by `aipod.SARAH`. Its rule: alpha and beta constant, batches and q of the order of the root of
    the number of examples. Takes no constraint.

    **Arguments:** those of `aipod.AiPOD`, and

    - `period` [q]: derivatives from one pass over all data to the next; by default an epoch.

    !!! example
        ```python
        solver = aipod.VRBO(upper_lr=0.02, lower_lr=0.1)
        ```
    """
    return _recursive("VRBO", SARAH(period), lower_steps, adjoint_steps, arguments)
