"""The other methods of the paper's Table 1, and two later ones, as compositions of the slots.

Each says what it was made for and refuses other problems. Each paper's rule for its step sizes,
numbers of steps and batches stands in its docstring, and `aipod.baselines.rule` gives it as
arguments.
"""

import dataclasses
from typing import Any

import optax

from aipod.algorithms._alternating import Alternating
from aipod.algorithms._paper import AiPOD
from aipod.algorithms._variants import variant_of
from aipod.problem import Scope
from aipod.slots.adjoint import Direct, PerturbedLower, SimultaneousAdjoint
from aipod.slots.estimators import EstimatorLike
from aipod.slots.lower import AugmentedLagrangian, GrowingSGD, SimultaneousLower
from aipod.slots.upper import DifferenceStep, EveryStep, paced_unless
from aipod.stepsize import Curvature, StepSize, check_positive


@variant_of(AiPOD)
def ALSET(*, adjoint_steps: int = 10, **arguments: Any) -> Alternating:
    """ALSET (Chen, Sun and Yin, NeurIPS 2021): AiPOD without constraints, step for step.

        y <- y - beta grad_y g(x, y; phi)   S times,   z by a Neumann series,   x <- x - alpha h_f

    Its rule: alpha = O(1 / sqrt(K)), beta = O(alpha), S = O(1), N = O(log K), batches of O(1).
    Takes no constraint.

    **Arguments:** those of `aipod.AiPOD`.

    !!! example
        ```python
        solver = aipod.ALSET(**aipod.baselines.rule("alset", 10_000))
        ```
    """
    made = AiPOD(adjoint_steps=adjoint_steps, **arguments)
    return dataclasses.replace(made, scope=Scope("ALSET", upper=False, lower=False))


@variant_of(AiPOD, without=("lower_steps", "estimator"))
def BSA(
    *, growth: float = 0.5, decay: float = 0.0, adjoint_steps: int = 10, **arguments: Any
) -> Alternating:
    """BSA (Ghadimi and Wang, 2018): the lower level is solved more and more exactly.

        y <- y - beta_t grad_y g(x, y; phi),   t = 0 .. t_k - 1;   x <- x - alpha h_f

    Its rule: t_k = O(sqrt(k)) lower steps of the size beta_t = O(1 / t) in outer step k,
    alpha = O(1 / sqrt(K)), N = O(log K), batches of O(1). Takes no constraint.

    **Arguments:** those of `aipod.AiPOD` but for `lower_steps`, and

    - `growth`: t_k = ceil(growth sqrt(k + 1)).
    - `decay`: beta_t = lower_lr / (1 + decay t).

    !!! example
        ```python
        solver = aipod.BSA(upper_lr=0.02, lower_lr=0.5, growth=1.0, decay=0.25)
        ```
    """
    made = AiPOD(adjoint_steps=adjoint_steps, **arguments)
    lower = GrowingSGD(lr=made.lower.lr, growth=growth, decay=decay)
    scope = Scope("BSA", upper=False, lower=False)
    return dataclasses.replace(made, lower=lower, scope=scope)


@variant_of(AiPOD, without=("adjoint_random", "estimator"))
def StocBiO(*, batch: int = 16, adjoint_steps: int = 10, **arguments: Any) -> Alternating:
    """stocBiO (Ji, Yang and Liang, ICML 2021): constant steps, and batches that make noise small.

        y <- y - beta mean over the batch of grad_y g(x, y; phi)   S times,   z by a Neumann series
        of such means,   x <- x - alpha h_f, with means as well

    Its rule: alpha, beta and S constant, N = O(log(1 / epsilon)), batches of O(1 / epsilon); then
    K = O(1 / epsilon) outer steps do. Its Neumann series lets the batch shrink from factor to
    factor; here all are alike. (AiPOD's Table 1 lists conjugate gradients, which the same paper
    uses for deterministic problems.) Takes no constraint.

    **Arguments:** those of `aipod.AiPOD`, and

    - `batch`: draws of the problem's samplers in each sample.

    !!! example
        ```python
        solver = aipod.StocBiO(upper_lr=0.1, lower_lr=0.5, batch=64)
        ```
    """
    made = AiPOD(adjoint_steps=adjoint_steps, **arguments)
    return dataclasses.replace(made, scope=Scope("stocBiO", upper=False, lower=False), batch=batch)


@variant_of(AiPOD, without=("lower_steps",))
def TTSA(*, adjoint_steps: int = 10, **arguments: Any) -> Alternating:
    """TTSA (Hong, Wai, Wang and Yang, 2020): one step on y, and a slower one on x, projected.

        y <- y - beta grad_y g(x, y; phi),   z by a Neumann series,   x <- project_x(x - alpha h_f)

    Its rule for nonconvex F: alpha = O(K^(-3/5)), beta = O(K^(-2/5)), N = O(log K), batches of
    O(1). Takes constraints on x, none on y.

    **Arguments:** those of `aipod.AiPOD` but for `lower_steps`, which is 1.

    !!! example
        ```python
        solver = aipod.TTSA(**aipod.baselines.rule("ttsa", 10_000))
        ```
    """
    made = AiPOD(lower_steps=1, adjoint_steps=adjoint_steps, **arguments)
    return dataclasses.replace(made, scope=Scope("TTSA", lower=False))


def SOBA(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    shared: bool = False,
    estimator: EstimatorLike | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """SOBA (Dagreou, Ablin, Vaiter and Moreau, NeurIPS 2022): one step of y, z and x at once.

        y <- y - beta grad_y g,   z <- z - rho (grad_yy g z - grad_y f),   x <- x - alpha h_f

    all three from the same (x, y, z), each on samples of its own. Its rule: alpha, beta and rho
    all O(1 / sqrt(K)), batches of O(1). Takes no constraint.

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [rho]: step sizes.
    - `shared`: one batch of each level for all three, four derivatives in place of five.
    - `estimator`: how derivatives are estimated, such as `aipod.SAGA()`.
    - `upper_optimizer`: an `optax.GradientTransformation` in place of `upper_lr`.

    !!! example
        ```python
        solver = aipod.SOBA(upper_lr=0.02, lower_lr=0.1, adjoint_lr=0.1)
        ```
    """
    return Alternating(
        lower=SimultaneousLower(lower_lr),
        adjoint=SimultaneousAdjoint(adjoint_lr),
        upper=EveryStep(lr=upper_lr, optimizer=paced_unless(upper_lr, upper_optimizer)),
        scope=Scope("SOBA", upper=False, lower=False),
        estimator=estimator,
        shared=shared,
    )


def IGAL(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 10_000,
    penalty: float = 10.0,
    tolerance: float = 1e-6,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """IG-AL (Tsaknakis, Khanduri and Hong, 2022): the lower level and its derivative exactly.

        y to a tolerance by an augmented Lagrangian,   z by a dense solve,   x <- x - alpha h_f

    Its rule: alpha constant. Its own paper has inequalities A y <= b, by their active set; here the
    constraints are equalities. Deterministic; takes constraints on y, none on x.

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta]: step sizes; the second is 1 / l_g1.
    - `lower_steps`: at most so many gradient steps on y in each outer step.
    - `penalty`, `tolerance`: those of `aipod.AugmentedLagrangian`.
    - `upper_optimizer`: an `optax.GradientTransformation` in place of `upper_lr`.

    !!! example
        ```python
        solver = aipod.IGAL(upper_lr=0.1, tolerance=1e-8)
        ```
    """
    return Alternating(
        lower=AugmentedLagrangian(lower_lr, penalty, tolerance, lower_steps),
        adjoint=Direct(),
        upper=EveryStep(lr=upper_lr, optimizer=paced_unless(upper_lr, upper_optimizer)),
        scope=Scope("IG-AL", upper=False, stochastic=False),
    )


@variant_of(IGAL)
def FirstOrderPenalty(
    *, perturbation: float = 1e-2, tolerance: float | None = None, **arguments: Any
) -> Alternating:
    """First-order penalty method (Kornowski, Padmanabhan, Wang, Zhang and Sra, NeurIPS 2024).

        y and y_delta, the minimisers of g and of g + delta f over the lower set, by an augmented
        Lagrangian;   x <- project_x(x - alpha (grad_x f + difference of first derivatives / delta))

    No second derivative is taken. Its rule: alpha constant, both levels solved to delta^2, and
    delta = O(epsilon) for a gradient of the size epsilon. Deterministic; takes constraints on both
    levels.

    **Arguments:** those of `IGAL`, and

    - `perturbation` [delta]: how much of f is mixed into g.
    - `tolerance`: default delta^2.

    !!! example
        ```python
        solver = aipod.FirstOrderPenalty(upper_lr=0.1, perturbation=1e-3)
        ```
    """
    check_positive(perturbation, "perturbation (delta)")
    made = IGAL(tolerance=perturbation**2 if tolerance is None else tolerance, **arguments)
    return Alternating(
        lower=made.lower,
        adjoint=PerturbedLower(made.lower, perturbation),
        upper=DifferenceStep(made.upper.lr, made.upper.optimizer, perturbation),
        scope=Scope("FirstOrderPenalty", stochastic=False),
    )
