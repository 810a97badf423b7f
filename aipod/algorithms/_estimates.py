"""What estimators keep from one outer step to the next, and the hypergradient that they give."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import as_key, hash32
from aipod.problem import Bilevel, grad_x_upper, implicit_term, in_order
from aipod.slots._oracles import UPPER, Estimation, Memories, Memory, first_memory, words_of
from aipod.slots._turn import Turn
from aipod.slots.estimators import Estimators, for_each

# Of the lower, the adjoint and the upper slot.
Estimates = tuple[Memories, Memories, Memories]


def check_estimates(estimator: Any, batch: int) -> None:
    """Raises `ValueError` unless a solver can have this estimator."""
    for_each(estimator)
    if estimator is not None and batch > 1:
        raise ValueError(
            f"estimator goes with batch=1, not with batch={batch}: leave batch out, and make the "
            "batches of the samplers larger."
        )


def first_estimates(solver: Any, problem: Bilevel, x: PyTree, y: PyTree) -> Estimates | None:
    """Before the first step; None where no slot keeps anything."""
    upper, lower = problem.upper_samples, problem.lower_samples
    if solver.estimator is None and not (in_order(upper) or in_order(lower)):
        return None
    each: Estimators = for_each(solver.estimator)
    return (
        {"gradient": first_memory(each.lower, lower, y, (x, y))},
        {
            "product": first_memory(each.adjoint, lower, y, (x, y, y)),
            "slope": first_memory(each.adjoint, upper, y, (x, y)),
        },
        {
            "implicit": first_memory(each.upper, lower, x, (x, y, y)),
            "direct": first_memory(each.upper, upper, x, (x, y)),
        },
    )


class Estimations(NamedTuple):
    """How each slot estimates in an outer step; None for plain minibatches.

    - `before`: what was kept of the outer step before.
    """

    lower: Estimation | None
    adjoint: Estimation | None
    upper: Estimation | None
    before: Estimates | None

    def after(self, found: PyTree) -> "Estimations":
        """The same, with the next draws of the upper level made after `found` is known.

        Where slots share draws, XLA would cut the batches of both levels before it uses any of
        them, and they do not fit into the fastest memory of a CPU together. Clients are left alone:
        they do not wait for each other.
        """
        upper = self.upper
        if upper is None or upper.memory is None or upper.keys is None:
            return self
        known = [_never(leaf) for leaf in jax.tree.leaves(found) if _is_real(leaf)]
        if not known or any(kept.count.ndim for kept in upper.memory.values()):
            return self

        def later(estimation: Any) -> Estimation:
            tied = {
                name: dataclasses.replace(kept, count=jnp.where(known[0], 0, kept.count))
                for name, kept in estimation.memory.items()
                if name in UPPER
            }
            return estimation._replace(memory=estimation.memory | tied)

        return self._replace(adjoint=later(self.adjoint), upper=later(upper))


def _is_real(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size)


def _never(leaf: Array) -> Array:
    """False, which a program learns only when it knows the leaf: nothing exceeds infinity."""
    return jnp.ravel(leaf)[0] > jnp.inf


def estimation_of(
    solver: Any, estimates: Estimates | None, key: PRNGKeyArray, keys: Any
) -> Estimations:
    """How each slot estimates in an outer step.

    `keys`: of the samples of the upper and the lower level that x sees.
    """
    before = estimates
    if estimates is None and not solver.shared:
        return Estimations(None, None, None, None)
    if estimates is not None and solver.shared:
        estimates = _counted_together(solver, estimates)
    each = for_each(solver.estimator)
    estimators = (each.lower, each.adjoint, each.upper)
    words = words_of(as_key(key))

    def own(slot: int) -> tuple[Array, Array]:
        # Slots that share draws visit the data in the same order, others each in their own.
        upper, lower = words
        return words if solver.shared else (hash32(upper + slot), hash32(lower + slot))

    lower, adjoint, upper = (
        Estimation(
            estimators[slot],
            None if estimates is None else estimates[slot],
            own(slot),
            keys if solver.shared else None,
        )
        for slot in range(3)
    )
    return Estimations(lower, adjoint, upper, before)


def _counted_together(solver: Any, estimates: Estimates) -> Estimates:
    """The same, with one counter for all derivatives that are asked for once in an outer step.

    Their counters have the same values. Where a program can see that, it draws a batch once and
    finds what several derivatives share once.
    """
    lower, adjoint, upper = (dict(memories) for memories in estimates)
    of_lower, of_upper = upper["implicit"], upper["direct"]

    def like(memory: Memory, other: Memory) -> Memory:
        return dataclasses.replace(memory, count=other.count, clock=other.clock)

    if solver.upper.needs_implicit:
        if solver.lower.single:
            lower["gradient"] = like(lower["gradient"], of_lower)
        if solver.adjoint.single:
            adjoint["product"] = like(adjoint["product"], of_lower)
    adjoint["slope"] = dataclasses.replace(adjoint["slope"], count=of_upper.count)
    return lower, adjoint, upper


def kept_memory(slot: Any, estimation: Estimation | None, memory: Any) -> Any:
    """What a slot's cost brings back; `ValueError` for a slot that does not take the estimator."""
    if estimation is None or memory is not None:
        return memory
    if estimation.estimator is not None:
        raise ValueError(
            f"{type(slot).__name__} takes no estimator here: use a slot that does (ProjectedSGD, "
            "ProxSkip, OneRound and SimultaneousLower; OneRoundAdjoint, ProxSkipAdjoint, "
            "SimultaneousAdjoint and Neumann with warm=True, which AiPOD and EAiPOD have where "
            "adjoint_steps is not given), or aipod.Estimators for the other slots alone."
        )
    return estimation.memory


def next_estimates(
    solver: Any, turn: Turn, estimations: Estimations, costs: tuple[Any, Any, Any]
) -> Estimates | None:
    """What is kept after an outer step, from what the slots' costs bring back."""
    lower, adjoint = (
        kept_memory(slot, estimation, cost.memory)
        for slot, estimation, cost in zip(
            (solver.lower, solver.adjoint), estimations[:2], costs[:2], strict=True
        )
    )
    upper: Any = turn.memory if costs[2].memory is None else costs[2].memory
    if solver.shared:
        return _counted_alone(estimations, (lower, adjoint, upper))
    return lower, adjoint, upper


def _counted_alone(estimations: Estimations, new: Estimates) -> Estimates:
    """The same, with each counter going on from its own value.

    Where it then grows by one in every step, XLA takes it out of the loop.
    """
    begun, before = cast(Any, estimations[:3]), cast(Estimates, estimations.before)
    # The adjoint's next sample of the upper level is the next one of x.
    drawn_by_x = new[2]["direct"].count - begun[2].memory["direct"].count

    def alone(slot: int, name: str, memory: Memory) -> Memory:
        first, start = before[slot][name], begun[slot].memory[name]
        drawn = drawn_by_x if name == "slope" else memory.count - start.count
        clock = first.clock + (memory.clock - start.clock)
        return dataclasses.replace(memory, count=first.count + drawn, clock=clock)

    lower, adjoint, upper = (
        {name: alone(slot, name, memory) for name, memory in memories.items()}
        for slot, memories in enumerate(new)
    )
    return lower, adjoint, upper


def estimated_hypergradient(
    turn: Turn, z: PyTree, keys: tuple[PRNGKeyArray, PRNGKeyArray], *, nested: bool
) -> tuple[Turn, PyTree, Any]:
    """A turn with grad_x f estimated, the estimate of w, and the memory after both.

    Where the lower set moves with x, w has a part of f. It is counted with grad_x f here, since
    both are of the upper level's samples.
    """
    problem, x, y = turn.problem, turn.x, turn.y

    def of_upper(point: PyTree, batch: Any) -> PyTree:
        here, there = point
        return grad_x_upper(problem, here, there, batch, follow=nested)

    def of_lower(point: PyTree, batch: Any) -> PyTree:
        here, there, along = point
        return implicit_term(problem, here, there, along, None, batch, with_upper=False)

    upper_key, lower_key = keys
    memory = turn.memory
    direct, memory = turn.asked(
        "direct", of_upper, (x, y), problem.upper_samples, upper_key, memory
    )
    implicit = None
    if nested:
        implicit, memory = turn.asked(
            "implicit", of_lower, (x, y, z), problem.lower_samples, lower_key, memory
        )
    return turn.along(direct=direct), implicit, memory
