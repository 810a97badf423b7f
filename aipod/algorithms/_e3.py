"""E3-AiPOD: one projection, one communication round, for each outer step."""

import optax

from aipod.algorithms._alternating import Alternating
from aipod.slots.adjoint import OneRoundAdjoint
from aipod.slots.estimators import EstimatorLike
from aipod.slots.lower import OneRound
from aipod.slots.upper import EveryStep, paced_unless
from aipod.stepsize import Curvature, StepSize


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
    estimator: EstimatorLike | None = None,
    lower_optimizer: optax.GradientTransformation | None = None,
    adjoint_optimizer: optax.GradientTransformation | None = None,
    memory: bool | None = None,
    relaxation: float | None = None,
) -> Alternating:
    """E3-AiPOD, ours and not the paper's: one projection, one round, for each outer step.

    S local steps on y, N local steps on the adjoint u (both ProxSkip with corrections that are kept
    from one outer step to the next, u too) and the local hypergradient come first; then y_hat,
    u_hat and the gradient are projected together, in a federation averaged in one round. Where no
    damping is needed its fixed points are exactly the stationary points.

    The defaults were chosen by measurement, on the paper's MNIST tasks and on the gallery of
    problems: step sizes follow the curvature of the lower level and shorten in noise, and upstairs
    works `aipod.paced_adam(eager=True)`.

    **Arguments:**

    - `upper_optimizer`: any `optax.GradientTransformation`; or
    - `upper_lr` [alpha]: plain projected SGD in its place.
    - `lower_lr` [beta], `adjoint_lr` [rho]: step sizes.
    - `lower_steps` [S], `adjoint_steps` [N]: local steps on y and on u; p = 1 / S and q = 1 / N.
    - `damping`: a Tikhonov term on the Hessian, which keeps a warm adjoint bounded where the lower
        level is not convex. By default it is 0 as long as the lower level looks convex, and found
        by itself otherwise.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits from the clients, with error
        feedback: half the bytes up, and the same fixed points. "float8" and "float4" for messages
        of 8 and 4 bits, a quarter and an eighth of the bytes up; what the server sends of x is then
        rounded as well, unless some of the clients are absent.
    - `estimator`: how derivatives are estimated from minibatches. With `aipod.SAGA()` and
        `upper_lr` a run on a finite sum converges to the solution itself, not to its noise. No
        damping is then found: the lower level must be convex, or `damping` given.
    - `lower_optimizer`, `adjoint_optimizer`: Optax transformations that move y and u where the
        averages of the clients meet; the fixed points stay. By default momentum that restarts by
        itself, `aipod.restarted_momentum`, in a federation, and nothing elsewhere. With
        `optax.sgd(1.0)` clients go on from the plain averages.
    - `memory`: with partial participation, whether each client remembers its last direction of x,
        and the absent ones count with theirs. Then who takes part adds no noise where a run
        settles. By default it is so where x has no bounds and all these directions take at most
        64 MiB.
    - `relaxation`: how many times its plain update the correction of y moves, see `aipod.OneRound`.

    !!! example
        ```python
        solver = aipod.E3AiPOD()
        ```
    """
    return Alternating(
        lower=OneRound(
            lr=lower_lr,
            steps=lower_steps,
            compression=compression,
            optimizer=lower_optimizer,
            relaxation=relaxation,
        ),
        adjoint=OneRoundAdjoint(adjoint_steps, adjoint_lr, damping, compression, adjoint_optimizer),
        upper=EveryStep(
            lr=upper_lr,
            optimizer=paced_unless(upper_lr, upper_optimizer, eager=True),
            compression=compression,
            memory=memory,
        ),
        estimator=estimator,
    )
