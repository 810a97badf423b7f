"""The named algorithms, as compositions of the slots."""

import optax

from aipod.algorithms._alternating import Alternating
from aipod.slots.adjoint._neumann import Neumann, Zero
from aipod.slots.adjoint._proxskip import ProxSkipAdjoint
from aipod.slots.lower._proxskip import ProjectedSGD, ProxSkip
from aipod.slots.lower._svrg import SVRG, LocalUpper
from aipod.slots.upper._every import Delayed, EveryStep, Periodic, fading_adam
from aipod.stepsize._stepsize import Curvature, StepSize


def AiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    adjoint_steps: int = 10,
    adjoint_lr: StepSize = Curvature(),
    adjoint_random: bool = False,
    damping: float = 0.0,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """AiPOD, the paper's algorithm `stoc-alg`: every step of both levels is projected.

    S projected SGD steps on y (`update-ys`), z by a Neumann series (`NS-wk`), then
    x <- project_x(x - alpha h_f) with h_f = grad_x f + w (`NS-hf`).

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [eta = c~ / l_g1]: step sizes, each a
        number, an Optax schedule of the outer step or, for the last two, `aipod.Curvature()`.
    - `lower_steps` [S], `adjoint_steps` [N]: steps on y and terms of the series.
    - `adjoint_random`: the paper's random number of factors in place of the sum.
    - `damping`: a Tikhonov term on the Hessian, for lower levels that are not convex.
    - `upper_optimizer`: an `optax.GradientTransformation` in place of `upper_lr`.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=0.01)
        ```
    """
    return Alternating(
        lower=ProjectedSGD(lr=lower_lr, steps=lower_steps),
        adjoint=Neumann(adjoint_steps, adjoint_lr, adjoint_random, damping),
        upper=EveryStep(lr=upper_lr, optimizer=upper_optimizer),
    )


def EAiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    lower_prob: float = 0.3,
    upper_steps: int = 1,
    extrapolation: float = 1.0,
    adjoint_steps: int = 10,
    adjoint_lr: StepSize = Curvature(),
    adjoint_random: bool = False,
    damping: float = 0.0,
    upper_optimizer: optax.GradientTransformation | None = None,
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
        adjoint=Neumann(adjoint_steps, adjoint_lr, adjoint_random, damping),
        upper=Delayed(
            steps=upper_steps, delta=extrapolation, lr=upper_lr, optimizer=upper_optimizer
        ),
    )


def E2AiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    lower_prob: float = 0.3,
    upper_steps: int = 1,
    adjoint_steps: int = 10,
    adjoint_lr: StepSize = Curvature(),
    adjoint_prob: float = 0.3,
    damping: float = 0.0,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """E2-AiPOD, the paper's algorithm `stoc-alg-skip-WS`: the adjoint skips projections too.

    Lower level as in E-AiPOD; the adjoint is a second ProxSkip, started at 0 in every outer step
    (`update-hatlambda-WS` to `update-lz2-WS`); x is projected when k mod T = 0 (`WS-df`, `WS-x`).
    Only without coupling (h = 0).

    **Arguments:** those of `AiPOD` and `lower_prob` [p], and

    - `adjoint_lr` [rho], `adjoint_prob` [q]: the step of the adjoint, and how often it projects.
    - `upper_steps` [T]: outer steps from one projection of x to the next.

    !!! example
        ```python
        solver = aipod.E2AiPOD(upper_lr=0.02, lower_lr=0.01, lower_prob=0.3, adjoint_prob=0.3)
        ```
    """
    return Alternating(
        lower=ProxSkip(lr=lower_lr, steps=lower_steps, prob=lower_prob),
        adjoint=ProxSkipAdjoint(
            adjoint_steps, adjoint_lr, adjoint_prob, warm=False, damping=damping
        ),
        upper=Periodic(steps=upper_steps, lr=upper_lr, optimizer=upper_optimizer),
    )


def E3AiPOD(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(iterations=2),
    lower_steps: int = 20,
    adjoint_steps: int = 2,
    adjoint_lr: StepSize = Curvature(iterations=2),
    damping: float | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
    compression: str | None = None,
) -> Alternating:
    """E3-AiPOD, ours and not the paper's: one projection, one round, for each outer step.

    S local steps on y, N local steps on the adjoint u (both ProxSkip with corrections that are kept
    from one outer step to the next, u too) and the local hypergradient come first; then y_hat,
    u_hat and the gradient are projected together, in a federation averaged in one round. Where no
    damping is needed its fixed points are exactly the stationary points.

    The defaults were chosen by measurement on the paper's MNIST task and then left alone: step
    sizes follow the curvature of the lower level and shorten in noise, and upstairs works
    `aipod.fading_adam()`.

    **Arguments:**

    - `upper_optimizer`: any `optax.GradientTransformation`; or
    - `upper_lr` [alpha]: plain projected SGD in its place.
    - `lower_lr` [beta], `adjoint_lr` [rho]: step sizes.
    - `lower_steps` [S], `adjoint_steps` [N]: local steps on y and on u; p = 1 / S and q = 1 / N.
    - `damping`: a Tikhonov term on the Hessian, which keeps a warm adjoint bounded where the lower
        level is not convex. By default it is 0 as long as the lower level looks convex, and found
        by itself otherwise.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits from the clients, with error
        feedback: half the bytes up, and the same fixed points.

    !!! example
        ```python
        solver = aipod.E3AiPOD()
        ```
    """
    if upper_lr is None and upper_optimizer is None:
        upper_optimizer = fading_adam()
    return Alternating(
        lower=ProxSkip(lr=lower_lr, steps=lower_steps, prob=None, compression=compression),
        adjoint=ProxSkipAdjoint(
            adjoint_steps, adjoint_lr, None, warm=True, damping=damping, compression=compression
        ),
        upper=EveryStep(lr=upper_lr, optimizer=upper_optimizer, compression=compression),
    )


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
        upper=LocalUpper(lr=upper_lr, steps=upper_steps, optimizer=upper_optimizer),
    )


def LFedNest(
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
    """LFedNest, the light version of FedNest: everything local but the averages of y and x.

    Two rounds in an outer step with one episode, at the price of a bias between unlike clients:
    plain local steps, and each client inverts its own Hessian.

    **Arguments:** those of `FedNest`.

    !!! example
        ```python
        solver = aipod.LFedNest(upper_lr=0.01, lower_lr=0.02)
        ```
    """
    return Alternating(
        lower=SVRG(lr=lower_lr, steps=lower_steps, episodes=lower_episodes, corrected=False),
        adjoint=Neumann(adjoint_steps, adjoint_lr, damping=damping, local=True),
        upper=LocalUpper(
            lr=upper_lr, steps=upper_steps, corrected=False, optimizer=upper_optimizer
        ),
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
            lr=upper_lr, steps=upper_steps, corrected=False, optimizer=upper_optimizer
        ),
    )
