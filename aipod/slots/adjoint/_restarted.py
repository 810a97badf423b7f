"""A warm adjoint that begins anew where its old u is of no use."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import inner
from aipod.problem import Bilevel, is_noisy
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.adjoint._health import Health
from aipod.slots.adjoint._proxskip import ProxSkipAdjoint
from aipod.slots.adjoint._stray import Straying
from aipod.stepsize import StepSize


class Restarted(AbstractAdjoint):
    """A warm `ProxSkipAdjoint` that goes back to u = e = 0 where u grows instead of settling.

    Over a convex lower level a warm start only helps. Elsewhere u would grow without bound: from a
    good u the steps are shorter than from u = 0, and where they are twice as long it is given up.
    In a federation two sums over the clients travel with a round for that. Without a server, in
    gossip, it is never given up: take damping where the lower level is not convex.

    **Arguments:**

    - `base`: a `ProxSkipAdjoint` with `warm=True`.
    """

    base: ProxSkipAdjoint

    def __check_init__(self) -> None:
        if not self.base.warm:
            raise ValueError("Restarted needs a ProxSkipAdjoint with warm=True.")

    @property
    def lr(self) -> StepSize | None:
        return self.base.lr

    @property
    def draws(self) -> tuple[int, int]:
        return self.base.draws

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        # The method stays one for sets without coupling, which a cold start insists on.
        dataclasses.replace(self.base, warm=False).init(problem, x, y)
        state = self.base.init(problem, x, y)
        straying = Straying.first(self._size(problem, y))
        return dataclasses.replace(state, straying=straying)

    def _size(self, problem: Bilevel, v: PyTree) -> Array:
        lower_set = problem.lower_set
        return lower_set.summed(inner(v, v, per_client=lower_set.per_client))

    def health(self, state: PyTree) -> Health | None:
        return self.base.health(state)

    def own(self, state: PyTree) -> PyTree:
        return self.base.own(state)

    def remedy(self, off: float) -> str:
        return self.base.remedy(off)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        z, new, cost = self.base.solve(turn, upper_batch, state)
        problem = turn.problem
        if problem.lower_set.apart:
            # One client alone cannot give up its e: those of all clients must sum to zero.
            return z, dataclasses.replace(new, straying=state.straying), cost
        # From u = 0 the steps would go so far; the mean of the steps made is what is left over.
        longest = self.base.steps * turn.lr(self.lr)
        moved, slope = optax.tree.sub(new.u, state.u), turn.upper_gradient_y(upper_batch)
        stray, straying = state.straying.after(
            self._size(problem, moved),
            longest**2 * self._size(problem, slope),
            noisy=is_noisy(problem),
        )
        new = dataclasses.replace(new, straying=straying)
        fresh = self.init(problem, turn.x, turn.y)
        kept = jax.tree.map(lambda a, b: jnp.where(stray, b, a), new, fresh)
        return z, kept, cost
