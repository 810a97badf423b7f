"""The algorithms: one alternation with three slots, and its named compositions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._tree import as_arrays, cast_like
from aipod.adjoint import AbstractAdjoint, Neumann, ProxSkipAdjoint
from aipod.cost import Cost, Counts
from aipod.hypergradient import implicit_term
from aipod.lower import AbstractLower, ProjectedSGD, ProxSkip
from aipod.problem import Bilevel
from aipod.sampling import batch_size, draw
from aipod.stepsize import (
    Curvature,
    CurvatureState,
    Rates,
    StepSize,
    curvature_init,
    curvature_iterations,
    curvature_update,
)
from aipod.upper import AbstractUpper, Delayed, EveryStep, Periodic


class State(eqx.Module):
    """Everything that one outer step hands to the next."""

    x: PyTree
    y: PyTree
    lower: PyTree
    adjoint: PyTree
    upper: PyTree
    curvature: CurvatureState | None
    step: Array
    counts: Counts


class Alternating(eqx.Module):
    """The alternation that every algorithm here is: lower, adjoint, hypergradient, upper.

    One outer step k draws everything from `fold_in(key, k)`; the same key therefore gives the same
    run however it is cut into pieces.

    **Arguments:**

    - `lower`: how y follows x, such as `ProjectedSGD` or `ProxSkip`.
    - `adjoint`: how z is found, such as `Neumann` or `ProxSkipAdjoint`.
    - `upper`: how x moves, such as `EveryStep`, `Delayed` or `Periodic`.

    !!! example
        ```python
        solver = aipod.Alternating(
            lower=aipod.ProxSkip(lr=0.01, steps=5, prob=0.3),
            adjoint=aipod.ConjugateGradient(rtol=1e-8),
            upper=aipod.EveryStep(lr=0.02),
        )
        state = solver.init(problem, x0, y0)
        state = solver.step(problem, state, key=jax.random.key(0))
        ```
    """

    lower: AbstractLower
    adjoint: AbstractAdjoint
    upper: AbstractUpper

    def __check_init__(self) -> None:
        for name, kind in (
            ("lower", AbstractLower),
            ("adjoint", AbstractAdjoint),
            ("upper", AbstractUpper),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} must be a slot made for it, got {type(getattr(self, name)).__name__}."
                )

    @property
    def _power_iterations(self) -> int:
        return curvature_iterations(self.lower.lr, self.adjoint.rate)

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        """The state before the first step: x0 projected on the upper set, y0 as it is."""
        problem.check(x0, y0)
        return _initial_state(self, problem, as_arrays(x0), as_arrays(y0))

    def step(self, problem: Bilevel, state: State, *, key: PRNGKeyArray) -> State:
        """One outer step k, compiled; its random numbers come from `key` and k alone."""
        return _compiled_step(self, problem, state, key)

    def traced_step(self, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
        """The same step for use inside a program that is compiled as a whole."""
        key = jax.random.fold_in(key, state.step)
        lower_key, adjoint_key, upper_key, xi_key, phi_key, curvature_key = jax.random.split(key, 6)
        x = state.x
        curvature, spent_on_curvature = state.curvature, 0
        if curvature is not None:
            curvature = curvature_update(
                problem,
                x,
                state.y,
                curvature,
                state.step,
                self._power_iterations,
                key=curvature_key,
            )
            spent_on_curvature = batch_size(problem.lower_samples)
        rates = Rates(state.step, None if curvature is None else curvature.estimate)

        y, lower, lower_cost = self.lower.run(
            problem, x, state.y, state.lower, rates, key=lower_key
        )
        upper_batch = draw(problem.upper_samples, xi_key)
        z, adjoint, adjoint_cost = self.adjoint.solve(
            problem, x, y, upper_batch, state.adjoint, rates, key=adjoint_key
        )
        lower_batch = draw(problem.lower_samples, phi_key)
        implicit = implicit_term(problem, x, y, z, upper_batch, lower_batch)
        new_x, upper, upper_cost = self.upper.update(
            problem, x, y, implicit, upper_batch, state.upper, rates, key=upper_key
        )
        own_cost = Cost(
            upper_samples=batch_size(problem.upper_samples),
            lower_samples=batch_size(problem.lower_samples) + spent_on_curvature,
        )
        counts = state.counts.add(
            lower=lower_cost, adjoint=adjoint_cost, upper=upper_cost, step=own_cost
        )
        return State(new_x, y, lower, adjoint, upper, curvature, state.step + 1, counts)

    def remedy(self) -> str:
        """What to change when a run diverged: the step sizes to try, by name."""
        rates = {
            "lower_lr": self.lower.lr,
            "adjoint_lr": self.adjoint.rate,
            "upper_lr": self.upper.lr,
        }
        tries = []
        for name, rate in rates.items():
            if isinstance(rate, Curvature):
                tries.append(f"{name}=Curvature(safety={float(rate.safety) / 2:.3g})")
            elif callable(rate):
                tries.append(f"a schedule of half the size for {name}")
            elif rate is not None:
                tries.append(f"{name}={float(rate) / 2:.3g} (it was {float(rate):.3g})")
        if not all(
            isinstance(rates[name], Curvature | None) for name in ("lower_lr", "adjoint_lr")
        ):
            tries.append("or lower_lr=aipod.Curvature(), which adapts by itself")
        return "Try smaller steps: " + ", ".join(tries) + "."


# Compiled as one program: a dozen small operations one by one would cost seconds.
@eqx.filter_jit
def _initial_state(solver: Alternating, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
    x = cast_like(problem.upper_set.project(x0), x0)
    return State(
        x=x,
        y=y0,
        lower=solver.lower.init(problem, x, y0),
        adjoint=solver.adjoint.init(problem, x, y0),
        upper=solver.upper.init(problem, x),
        curvature=curvature_init(y0) if solver._power_iterations else None,
        step=jnp.zeros((), jnp.int32),
        counts=Counts.zero(),
    )


@eqx.filter_jit
def _compiled_step(solver: Alternating, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
    return solver.traced_step(problem, state, key)


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
