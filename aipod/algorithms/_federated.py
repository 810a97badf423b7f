"""Methods made for federations: FedNest, its light version, and FedAvg."""

import dataclasses
from typing import Any

import optax

from aipod.algorithms._alternating import Alternating
from aipod.algorithms._variants import variant_of
from aipod.slots.adjoint import Neumann, Zero
from aipod.slots.lower import SVRG
from aipod.slots.upper import LocalUpper, paced_unless
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
