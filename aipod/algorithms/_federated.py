"""Methods made for federations: FedNest, its light version, FedBiOAcc, and FedAvg."""

import dataclasses
from typing import Any

import optax

from aipod.algorithms._alternating import Alternating
from aipod.algorithms._variants import variant_of
from aipod.slots.adjoint import Neumann, ProxSkipAdjoint, Zero
from aipod.slots.estimators import STORM
from aipod.slots.lower import SVRG, ProjectedSGD
from aipod.slots.upper import EveryStep, LocalUpper, paced_unless
from aipod.stepsize import Curvature, StepSize


def FedNest(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 10,
    lower_episodes: int = 1,
    upper_steps: int = 1,
    adjoint_steps: int = 5,
    adjoint_lr: StepSize = Curvature(),
    damping: float = 0.0,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """FedNest (Tarzanagh et al., ICML 2022): variance-reduced local steps at both levels.

    Each of the T episodes downstairs averages the gradient, makes tau local SVRG steps and averages
    y (FedInn); the Neumann series is averaged after every factor (FedIHGP); upstairs the
    hypergradient is averaged, tau local SVRG steps follow, and x is averaged (FedOut).

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr`: step sizes.
    - `lower_steps` [tau], `lower_episodes` [T]: local steps on y, and how often in an outer step.
    - `upper_steps` [tau]: local steps on x.
    - `adjoint_steps` [N]: terms of the series.
    - `damping`: a Tikhonov term on the Hessian.
    - `upper_optimizer`: an Optax optimiser of the server, on x minus its average after the local
        steps; where `upper_steps` is 1, in place of `upper_lr`. Not in the original.

    !!! example
        ```python
        solver = aipod.FedNest(upper_lr=0.01, lower_lr=0.02, lower_steps=10)
        ```
    """
    return Alternating(
        lower=SVRG(lr=lower_lr, steps=lower_steps, episodes=lower_episodes),
        adjoint=Neumann(adjoint_steps, adjoint_lr, damping=damping),
        upper=LocalUpper(
            lr=upper_lr, steps=upper_steps, optimizer=paced_unless(upper_lr, upper_optimizer)
        ),
    )


@variant_of(FedNest)
def LFedNest(**arguments: Any) -> Alternating:
    """LFedNest, the light version of FedNest: everything local but the averages of y and x.

    Two rounds in an outer step with one episode, at the price of a bias between unlike clients:
    plain local steps, and each client inverts its own Hessian.

    **Arguments:** those of `FedNest`.

    !!! example
        ```python
        solver = aipod.LFedNest(upper_lr=0.01, lower_lr=0.02)
        ```
    """
    made: Any = FedNest(**arguments)
    return Alternating(
        lower=dataclasses.replace(made.lower, corrected=False),
        adjoint=dataclasses.replace(made.adjoint, local=True),
        upper=dataclasses.replace(made.upper, corrected=False),
    )


def FedBiOAcc(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    momentum: StepSize = 0.1,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """FedBiOAcc (Li, Huang and Huang, NeurIPS 2023): recursive momentum for y, u and x.

        v <- grad_y g + (1 - a) (v - grad_y g at the last point),       y <- average(y - beta v)
        q <- grad_y f + G u + (1 - a) (q - the same at the last point), u <- average(u - rho q)
        h <- grad_x f + w + (1 - a) (h - the same at the last point),   x <- average(x - alpha h)

    by `aipod.STORM`, with one local step between two averages (the paper's I = 1); the momenta are
    then averages as well. Its rule: all steps O(K^(-1/3)), a = O(K^(-2/3)).

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [rho]: step sizes.
    - `momentum` [a]: the weight of the newest derivative, a number or an Optax schedule.
    - `upper_optimizer`: an Optax optimiser in place of `upper_lr`. Not in the original.

    !!! example
        ```python
        solver = aipod.FedBiOAcc(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05)
        ```
    """
    return Alternating(
        lower=ProjectedSGD(lr=lower_lr, steps=1),
        adjoint=ProxSkipAdjoint(1, adjoint_lr, 1.0, warm=True),
        upper=EveryStep(lr=upper_lr, optimizer=paced_unless(upper_lr, upper_optimizer)),
        estimator=STORM(momentum),
    )


def FedAvg(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 10,
    upper_steps: int = 1,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """FedAvg on both variables, blind to the nesting: local steps on y, then on x, then averages.

    x follows grad_x f alone. On a problem whose two objectives are one loss this is training x and
    y jointly, the floor that bilevel methods must beat.

    **Arguments:** those of `FedNest` that remain.

    !!! example
        ```python
        solver = aipod.FedAvg(upper_lr=0.01, lower_lr=0.02)
        ```
    """
    return Alternating(
        lower=SVRG(lr=lower_lr, steps=lower_steps, episodes=1, corrected=False),
        adjoint=Zero(),
        upper=LocalUpper(
            lr=upper_lr,
            steps=upper_steps,
            corrected=False,
            optimizer=paced_unless(upper_lr, upper_optimizer),
            nested=False,
        ),
    )
