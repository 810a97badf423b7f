"""The one solver class: three slots composed into an outer step."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.functions import keep
from aipod._misc.tree import as_arrays, cast_like
from aipod.algorithms._advice import check_slots, smaller_steps
from aipod.algorithms._estimates import (
    check_estimates,
    estimated_hypergradient,
    estimation_of,
    first_estimates,
    next_estimates,
)
from aipod.algorithms._first import compiled_first, compiled_initial
from aipod.algorithms._haste import hastiness, stiffer, unless
from aipod.algorithms._keeping import Keeping, keeping_of
from aipod.algorithms._looks import look
from aipod.algorithms._moves import last_moves, with_moves
from aipod.algorithms._packed import PackedWatch
from aipod.algorithms._returns import initial, like_before, returned
from aipod.algorithms._spread import spread_step
from aipod.algorithms._state import State, in_rows_of
from aipod.algorithms._step_keys import keys_of, round_key_of
from aipod.algorithms._watch import Outcome
from aipod.problem import Bilevel, Scope, averaged, draw, implicit_term
from aipod.slots._cost import Counts, rounds_of
from aipod.slots._oracles import spent
from aipod.slots._turn import Turn
from aipod.slots.adjoint import AbstractAdjoint
from aipod.slots.estimators import EstimatorLike
from aipod.slots.lower import AbstractLower
from aipod.slots.upper import AbstractUpper
from aipod.stepsize import (
    Rates,
    check_steps,
    curvature_heard,
    curvature_init,
    curvature_iterations,
)


class Alternating(eqx.Module):
    """The one solver class: three slots composed into an outer step.

    The lower slot moves y, the adjoint slot finds z, and the upper slot moves x along the
    hypergradient that they give.

    One outer step k draws everything from `fold_in(key, k)`; the same key therefore gives the same
    run however it is cut into pieces.

    **Arguments:**

    - `lower`: how y follows x, such as `ProjectedSGD` or `ProxSkip`.
    - `adjoint`: how z is found, such as `Neumann` or `ProxSkipAdjoint`.
    - `upper`: how x moves, such as `EveryStep`, `Delayed` or `Periodic`.
    - `scope`: the problems that the method accepts; by default all that its slots accept.
    - `batch`: how many draws of the problem's samplers are averaged into each sample.
    - `estimator`: how derivatives are estimated from minibatches, such as `SAGA()`; for each slot
        its own with `Estimators`. By default each is that of the batch that was drawn.
    - `shared`: whether all slots of an outer step use the same two batches, for slots that draw
        once in a step.

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
    estimator: EstimatorLike | None = None
    shared: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_steps(self.batch, "batch")
        check_estimates(self.estimator, self.batch)
        check_slots(self)
        if self.scope is not None and not isinstance(self.scope, Scope):
            raise ValueError(f"scope must be an aipod.Scope, got {type(self.scope).__name__}.")
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
        return curvature_iterations(self.lower.lr, self.adjoint.lr)

    def _held(self, problem: Bilevel, x: PyTree) -> Bilevel:
        """The problem with features that several loops of this outer step share."""
        draws = self.adjoint.draws
        if not isinstance(draws, tuple) or len(draws) != 2:
            raise ValueError(
                f"{type(self.adjoint).__name__}.draws must be two numbers, the batches of the "
                f"lower and of the upper level, got {draws!r}."
            )
        lower_draws = self.lower.draws + draws[0] + (self._power_iterations > 0)
        return problem.hold(x, lower_draws=lower_draws, upper_draws=draws[1])

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        """The state before the first step: x0 projected on the upper set, y0 as it is.

        Where all clients of a federation have the same y after every outer step, y0 is averaged.
        """
        state, keeping = self.init_kept(problem, x0, y0)
        return state if keeping is None else keeping.whole(state)

    def _check(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> None:
        problem.check(x0, y0)
        if self.wire is not None and not (problem.fully_federated or problem.partly_federated):
            raise ValueError(
                "compression is for federations with a server, of all clients or of cohorts, such "
                "as aipod.federated.federate makes: leave compression out."
            )
        if self.scope is not None:
            self.scope.check(problem)

    def init_kept(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> tuple[State, Keeping | None]:
        """The state before the first step as it is kept between steps, and how that is."""
        x0, y0 = keep((x0, y0))
        self._check(problem, x0, y0)
        x0, y0 = as_arrays((x0, y0))
        keeping = keeping_of(self, problem, x0, y0)
        if problem.lower_set.cohorts and (keeping is None or not keeping.some):
            raise ValueError(
                f"chosen='step': {type(self.upper).__name__} and {type(self.lower).__name__} leave "
                "clients with an x or y of their own, from which those who come next cannot go "
                "on: use chosen='round', or upper_steps=1."
            )
        if keeping is None:
            return compiled_initial(self, problem, x0, y0), None
        return compiled_first(self, keeping, problem, x0, y0), keeping

    def initial(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        """The state before the first step, for use inside a program."""
        x = cast_like(problem.upper_set.start(x0), x0)
        adjoint = initial(self.adjoint, self.adjoint.init(problem, x, y0))
        upper = initial(self.upper, self.upper.init(problem, x))
        return State(
            x=x,
            y=y0,
            lower=initial(self.lower, self.lower.init(problem, x, y0)),
            adjoint=adjoint,
            upper=upper,
            curvature=curvature_init(y0, problem.lower_set) if self._power_iterations else None,
            step=jnp.zeros((), jnp.int32),
            counts=Counts.zero(),
            watch=PackedWatch.first(problem, x, y0, self.upper.seen(upper)),
            moves=optax.tree.zeros_like((x, y0)) if self.upper.needs_moves else None,
            estimates=first_estimates(self, problem, x, y0),
        )

    def step(self, problem: Bilevel, state: State, *, key: PRNGKeyArray) -> State:
        """One outer step k, compiled; its random numbers come from `key` and k alone."""
        return _compiled_step(self, problem, state, key)

    def traced_step(self, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
        """The same step for use inside a program that is compiled as a whole."""
        keeping = keeping_of(self, problem, state.x, state.y)
        if keeping is None:
            return self._step(problem, state, key)
        return keeping.whole(self.kept_step(keeping, problem, keeping.kept(state), key))

    def kept_step(
        self, keeping: Keeping | None, problem: Bilevel, state: State, key: PRNGKeyArray
    ) -> State:
        """The same step on a state that is kept between steps as `keeping` says."""
        if keeping is None:
            return self._step(problem, state, key)
        chosen = keeping.choose(round_key_of(key, state.step))
        if keeping.mesh is not None:
            return spread_step(self._step, keeping, problem, state, key, chosen)
        inside = keeping.problem(problem, chosen, round_key_of(key, state.step + 1))
        new = self._step(inside, keeping.working(state, chosen), key)
        return keeping.after(new, state, chosen)

    def _step(self, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
        if self.batch > 1:
            problem = averaged(problem, self.batch)
        lower_key, adjoint_key, upper_key, xi_key, phi_key, curvature_key = keys_of(key, state.step)
        x, samples = state.x, (xi_key, phi_key)
        each = estimation_of(self, state.estimates, key, samples)
        problem = self._held(problem.inside(), x)
        seen = look(self.lower, problem, state, self._power_iterations, curvature_key)
        curvature, estimate = seen.curvature, seen.estimate
        moves = last_moves(state)
        damping = 0.0 if state.curvature is None else state.curvature.damping()
        uneven = 1.0 if curvature is None else curvature.uneven()
        rates = Rates(state.step, estimate, moves, stiffer(curvature, state), damping, uneven)
        turn = Turn(problem, x, state.y, rates, lower_key).along(estimation=each.lower)
        found: Any = self.lower.run(turn, state.lower)
        names: tuple[str, ...] = ("y", "its state", "its cost")
        y, lower, lower_cost = returned(self.lower, "run", found, names, (state.y, state.lower))
        each = each.after(lower)
        # With bounds y moves on its active face, an affine set, until the projections at the end.
        faced = self.lower.faced(problem, lower)
        where = self.lower.seen_from(faced, x, y)
        turn = turn._replace(problem=faced, y=where, key=adjoint_key).along(estimation=each.adjoint)
        upper_batch = draw(problem.upper_samples, xi_key)
        found = self.adjoint.solve(turn, upper_batch, state.adjoint)
        names = ("z", "its state", "its cost")
        z, adjoint, adjoint_cost = returned(self.adjoint, "solve", found, names, (y, state.adjoint))
        nested, implicit, estimates = self.upper.needs_implicit, None, None
        turn = turn._replace(key=upper_key)
        turn = turn.along(estimation=each.upper, told=self.adjoint.told(adjoint))
        if state.estimates is not None:
            turn, implicit, memory = estimated_hypergradient(turn, z, samples, nested=nested)
            turn = turn.with_memory(memory)
        elif nested:
            lower_batch = draw(problem.lower_samples, phi_key)
            implicit = implicit_term(faced, x, where, z, upper_batch, lower_batch)
        found = self.upper.update(turn, z, implicit, upper_batch, state.upper)
        names = ("x", "its state", "its cost")
        new_x, upper, upper_cost = returned(self.upper, "update", found, names, (x, state.upper))
        if state.estimates is not None:
            costs = (lower_cost, adjoint_cost, upper_cost)
            estimates = next_estimates(self, turn, each, costs)
        # Projections left for the end of the step travel together with x: the same clients, and
        # one round, or one of their own when x is not averaged in this step.
        settled = self.lower.settle(turn._replace(problem=problem, y=y).along(start=state.y), lower)
        names = ("y", "its state")
        y, lower = returned(self.lower, "settle", settled, names, (y, state.lower))
        kept = self.adjoint.settle(turn.along(start=state.adjoint), adjoint)
        adjoint = like_before(self.adjoint, "settle", kept, state.adjoint)
        curvature = curvature_heard(curvature, problem.lower_set.for_round(turn.round_key))
        own_cost = turn.lower_cost(lower_draws=nested + seen.draws, upper_draws=1)
        own_cost = own_cost.with_samples(*spent(state.estimates, estimates, shared=self.shared))
        if self.lower.deferred or self.adjoint.deferred:
            alone = rounds_of(problem.lower_set, 1) - jnp.minimum(upper_cost.rounds, 1)
            own_cost = dataclasses.replace(own_cost, rounds=jnp.maximum(alone, 0))
        counts = state.counts.add(
            lower=lower_cost, adjoint=adjoint_cost, upper=upper_cost, step=own_cost
        )
        outcome = Outcome(
            x=x,
            new_x=new_x,
            y=in_rows_of(state.watch.window_y, y),
            before=self.upper.seen(state.upper),
            seen=self.upper.seen(upper),
            health=self.adjoint.health(adjoint),
            curvature=estimate,
        )
        unseen = seen.unseen(self.lower, lower)
        hasty, curvature = hastiness(problem.lower_set, estimate, curvature, y, state, unseen)
        watch = state.watch.after(problem, state.step, outcome, taken_back=hasty)
        new = State(new_x, y, lower, adjoint, upper, curvature, state.step + 1, counts, watch)
        new = dataclasses.replace(new, estimates=estimates)
        return with_moves(unless(hasty, new, state), state)

    def own(self, state: State) -> State:
        """For each leaf of a state whether it belongs to one client; else all have the same."""
        common: Any = jax.tree.map(lambda _: False, state)
        lower, adjoint = self.lower.own(state.lower), self.adjoint.own(state.adjoint)
        watch = state.watch.own()
        return dataclasses.replace(common, lower=lower, adjoint=adjoint, watch=watch)

    def remedy(self) -> str:
        """What to change when a run diverged: the step sizes to try, by name."""
        return smaller_steps(self)


@eqx.filter_jit
def _compiled_step(solver: Alternating, problem: Bilevel, state: State, key: PRNGKeyArray) -> State:
    return solver.traced_step(problem, state, key)
