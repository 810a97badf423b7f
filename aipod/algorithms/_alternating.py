"""The alternation that every algorithm is, with its three slots and the only `step`."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._hypergradient._exact import implicit_term
from aipod._misc.keys import as_key, subkeys
from aipod._misc.tree import as_arrays, cast_like
from aipod.problem._averaging import averaged
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.problem._scope import Scope
from aipod.slots._cost import Cost, Counts, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.adjoint._neumann import AbstractAdjoint
from aipod.slots.lower._proxskip import AbstractLower
from aipod.slots.upper._every import AbstractUpper
from aipod.stepsize._curvature import (
    CurvatureState,
    curvature_init,
    curvature_iterations,
    curvature_update,
)
from aipod.stepsize._stepsize import Curvature, Rates, check_steps


class State(eqx.Module):
    """Everything that one outer step hands to the next.

    The slots keep their own parts in `lower`, `adjoint` and `upper`.

    !!! example
        ```python
        state = solver.init(problem, x0, y0)
        state = solver.step(problem, state, key=jax.random.key(0))
        state.x, state.y, state.step
        ```
    """

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
    - `scope`: the problems that the method accepts; by default all that its slots accept.
    - `batch`: how many draws of the problem's samplers are averaged into each sample.

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
    scope: Scope | None = None
    batch: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        check_steps(self.batch, "batch")
        for name, kind in (
            ("lower", AbstractLower),
            ("adjoint", AbstractAdjoint),
            ("upper", AbstractUpper),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} must be a slot made for it, got {type(getattr(self, name)).__name__}."
                )
        if len({self.lower.wire, self.adjoint.wire, self.upper.wire}) > 1:
            raise ValueError(
                "compression must be the same for lower, adjoint and upper: their messages travel "
                "together."
            )

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return self.lower.wire

    @property
    def _power_iterations(self) -> int:
        return curvature_iterations(self.lower.lr, self.adjoint.rate)

    def _held(self, problem: Bilevel, x: PyTree) -> Bilevel:
        """The problem with features that several loops of this outer step share."""
        lower_draws, upper_draws = self.adjoint.draws
        if self._power_iterations:
            lower_draws += 1
        return problem.hold(x, lower_draws=self.lower.draws + lower_draws, upper_draws=upper_draws)

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        """The state before the first step: x0 projected on the upper set, y0 as it is."""
        problem.check(x0, y0)
        if self.wire is not None and not problem.fully_federated:
            raise ValueError(
                "compression is for federations in which all clients take part in every round: "
                "leave compression out, or participation at 1."
            )
        if self.scope is not None:
            self.scope.check(problem)
        return _initial_state(self, problem, as_arrays(x0), as_arrays(y0))

    def step(self, problem: Bilevel, state: State, *, key: PRNGKeyArray) -> State:
        """One outer step k, compiled; its random numbers come from `key` and k alone."""
        return _compiled_step(self, problem, state, key)

    def traced_step(self, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
        """The same step for use inside a program that is compiled as a whole."""
        if self.batch > 1:
            problem = averaged(problem, self.batch)
        key = jax.random.fold_in(as_key(key), state.step)
        lower_key, adjoint_key, upper_key, xi_key, phi_key, curvature_key = subkeys(key, 6)
        x = state.x
        problem = self._held(problem, x)
        curvature, estimate, spent_on_curvature = state.curvature, None, 0
        if curvature is not None:
            curvature, estimate = curvature_update(
                problem,
                x,
                state.y,
                curvature,
                state.step,
                self._power_iterations,
                key=curvature_key,
            )
            spent_on_curvature = batch_size(problem.lower_samples)
        rates = Rates(state.step, estimate)

        turn = Turn(problem, x, state.y, rates, lower_key)
        y, lower, lower_cost = self.lower.run(turn, state.lower)
        turn = turn._replace(y=y, key=adjoint_key)
        upper_batch = draw(problem.upper_samples, xi_key)
        z, adjoint, adjoint_cost = self.adjoint.solve(turn, upper_batch, state.adjoint)
        lower_batch = draw(problem.lower_samples, phi_key)
        implicit = implicit_term(problem, x, y, z, upper_batch, lower_batch)
        turn = turn._replace(key=upper_key)
        new_x, upper, upper_cost = self.upper.update(turn, z, implicit, upper_batch, state.upper)
        # What was left for the end of the step travels together with x: the same clients, and
        # one round, or one of its own when x is not averaged in this step.
        y, lower = self.lower.settle(turn, lower)
        adjoint = self.adjoint.settle(turn, adjoint)
        own_cost = Cost(
            upper_samples=batch_size(problem.upper_samples),
            lower_samples=batch_size(problem.lower_samples) + spent_on_curvature,
        )
        if self.lower.deferred or self.adjoint.deferred:
            alone = rounds_of(problem.lower_set, 1) - jnp.minimum(upper_cost.rounds, 1)
            own_cost = dataclasses.replace(own_cost, rounds=jnp.maximum(alone, 0))
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
        curvature=curvature_init(y0, problem.lower_set) if solver._power_iterations else None,
        step=jnp.zeros((), jnp.int32),
        counts=Counts.zero(),
    )


@eqx.filter_jit
def _compiled_step(solver: Alternating, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
    return solver.traced_step(problem, state, key)
