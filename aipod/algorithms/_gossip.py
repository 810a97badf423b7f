"""Methods made for clients without a server: D-SOBA and SPARKLE."""

from typing import Any

import optax

from aipod.algorithms._alternating import Alternating
from aipod.slots.adjoint import ProxSkipAdjoint, SimultaneousAdjoint
from aipod.slots.lower import ProxSkip, SimultaneousLower
from aipod.slots.upper import AbstractUpper, EveryStep, MovingAverage, paced_unless
from aipod.stepsize import Curvature, StepSize


def DSOBA(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    average: float = 0.3,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """D-SOBA (Kong, Zhu, Lu, Huang and Yuan, 2024): SOBA with neighbours, all at once.

        h <- (1 - theta) h + theta (grad_x f - grad_xy g z),         x <- V (x - alpha h)
        y <- V (y - beta grad_y g),   z <- V (z - rho (grad_yy g z - grad_y f))

    with all derivatives at the old x, y and z; V mixes with the neighbours (`aipod.Gossip`), and
    x, y and z share one exchange. Nothing is corrected: where clients differ, it stops near a
    solution. With `aipod.Consensus` V is the average. Here h begins at 0 and is renewed before x
    moves. Only the paper's abstract was at hand (arXiv 2402.03167, later in JMLR 26, 2025): the
    equations are its version with second derivatives as we know it, not checked against the text.

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [rho]: step sizes.
    - `average` [theta]: how much the newest hypergradient counts.
    - `upper_optimizer`: an Optax optimiser in place of `upper_lr` and the average, which gets a
        tracked gradient; where neither is given, `aipod.paced_adam()`. Not in the original.

    !!! example
        ```python
        solver = aipod.DSOBA(upper_lr=0.01, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return Alternating(
        lower=SimultaneousLower(lower_lr),
        adjoint=SimultaneousAdjoint(adjoint_lr),
        upper=_averaged(upper_lr, upper_optimizer, average, corrected=False),
    )


def SPARKLE(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    average: float = 0.3,
    damping: float = 0.0,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """SPARKLE (Zhu, Kong, Lu, Huang and Yuan, NeurIPS 2024), exact diffusion at every level.

    One step on y at (x, y), then one on z at the new y, then one on x along a moving average of
    the hypergradient at the new y and z, each by exact diffusion and with an exchange of its own:

        v_hat = v - step (slope - r),   v <- V v_hat,   r <- r + (v - v_hat) / step

    which without r reads v_{k+1} = V (2 v_k - v_{k-1} - step (slope_k - slope_{k-1})), the usual
    form of exact diffusion. Its fixed points are the solutions. Only the paper's abstract and a
    summary were at hand (arXiv 2411.14166: one loop, exact diffusion as one of its corrections):
    the order of the steps and the moving average are as we know them, not checked against the text.

    **Arguments:** those of `DSOBA`, and

    - `damping`: a Tikhonov term on the Hessian, for lower levels that are not convex.

    !!! example
        ```python
        solver = aipod.SPARKLE(upper_lr=0.01, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    adjoint: Any = ProxSkipAdjoint(1, adjoint_lr, 1.0, warm=True, damping=damping)
    return Alternating(
        lower=ProxSkip(lr=lower_lr, steps=1, prob=1.0),
        adjoint=adjoint,
        upper=_averaged(upper_lr, upper_optimizer, average, corrected=True),
    )


def _averaged(
    lr: StepSize | None, optimizer: Any, average: float, *, corrected: bool
) -> AbstractUpper:
    if lr is not None and optimizer is None:
        return MovingAverage(lr, average, corrected=corrected)
    return EveryStep(lr=lr, optimizer=paced_unless(lr, optimizer))
