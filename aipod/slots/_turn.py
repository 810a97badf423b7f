"""What a slot is given when its turn comes in an outer step."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import round_key, subkeys
from aipod._misc.tree import axpy, inner
from aipod.problem import (
    Bilevel,
    batch_size,
    draw,
    grad_x_upper,
    grad_y_upper,
    hessian_product,
)
from aipod.sets import AbstractSet
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._oracles import Estimation, Memories, Raw, ask
from aipod.slots._promise import Promise, rise_along, slopes_along
from aipod.stepsize import Rates, StepSize


class Turn(NamedTuple):
    """What a slot is given when its turn comes: where the run stands, and a key to draw with.

    - `problem`: the `Bilevel` problem.
    - `x`, `y`: the current iterates. The adjoint and the upper slot see the y that the lower slot
        has just returned.
    - `rates`: evaluates step sizes; `turn.lr(self.lr)` is the short form.
    - `key`: a random key of this slot and this outer step. Split it with `turn.keys`; the clients
        of a round come from `turn.round_key`.

    In a federation x and y have a client axis in front. A slot works on each client's part by
    itself; only the sets' projections, `largest` and `summed` go across clients. A norm over a
    whole leaf would do so too, and would differ from what one client sees over a network.

    !!! example
        ```python
        rates = aipod.stepsize.Rates(jnp.zeros((), int), None)
        turn = aipod.Turn(problem, x, y, rates, jax.random.key(0))
        slope = turn.lower_gradient()(y, turn.key)  # grad_y g on a fresh batch
        ```
    """

    problem: Bilevel
    x: PyTree
    y: PyTree
    rates: Rates
    key: PRNGKeyArray

    @property
    def estimation(self) -> Estimation | None:
        """How derivatives are estimated; None for plain minibatches."""
        return self.rates.estimation

    @property
    def direct(self) -> PyTree:
        """For the upper slot, an estimate of grad_x f at (x, y), where there is one."""
        return self.rates.direct

    def along(self, **extras: Any) -> "Turn":
        """The turn with other `estimation`, `direct`, `start` or `told`, kept with the rates."""
        return self._replace(rates=dataclasses.replace(self.rates, **extras))

    @property
    def memory(self) -> Memories | None:
        """What the estimator of this slot keeps, to be carried through a loop of oracles."""
        return None if self.estimation is None else self.estimation.memory

    @property
    def estimated(self) -> bool:
        """Whether derivatives come from an estimator, and not from one batch each."""
        return self.estimation is not None and self.estimation.estimator is not None

    def with_memory(self, memory: Memories | None) -> "Turn":
        """After oracles that returned this memory."""
        if self.estimation is None:
            return self
        return self.along(estimation=self.estimation._replace(memory=memory))

    @property
    def sample_keys(self) -> tuple[PRNGKeyArray, PRNGKeyArray]:
        """Keys for one draw of the upper and one of the lower level."""
        if self.estimation is not None and self.estimation.keys is not None:
            return self.estimation.keys
        upper, lower = subkeys(self.key, 2)
        return upper, lower

    @property
    def shares_draws(self) -> bool:
        """Whether all slots of the outer step use the same two batches."""
        return self.estimation is not None and self.estimation.keys is not None

    @property
    def step(self) -> Array:
        """The number of outer steps made before this one."""
        return self.rates.step

    @property
    def moves(self) -> tuple[PyTree, PyTree, PyTree] | None:
        """How far the last outer step moved x and y, and the y that it ended with.

        For upper slots that answer `needs_moves` with True. The y that all clients share may have
        one row.
        """
        return self.rates.moves

    @property
    def start(self) -> PyTree:
        """For `settle` alone, what the outer step began with: y, or the state of the adjoint."""
        return self.rates.start

    @property
    def told(self) -> Any:
        """For the upper slot and for `settle`, what the adjoint slot found besides z."""
        return self.rates.told

    @property
    def lower_set(self) -> AbstractSet:
        """The lower set at x, which loops over y project on."""
        return self.problem.lower_set.at(self.x)

    @property
    def round_key(self) -> PRNGKeyArray:
        """Chooses the clients of the round that ends the outer step."""
        return round_key(self.key, 0)

    def lr(self, lr: StepSize | None) -> Array:
        """The value of a step size in this outer step."""
        return self.rates(lr)

    def keys(self, count: int) -> PRNGKeyArray:
        """`count` independent keys."""
        return subkeys(self.key, count)

    def lower_gradient(self, draws: int = 1) -> Callable[[PyTree, PRNGKeyArray], PyTree]:
        """(y, key) -> grad_y g(x, y; phi) on a batch drawn with the key, as a direction of the set.

        `draws`: how many batches the slot will draw; features of a `Composite` are computed once
        where that is less work.
        """
        objective, samples = self.problem.lower_at(self.x, draws)
        lower_set = self.problem.lower_set

        def gradient(y: PyTree, key: PRNGKeyArray) -> PyTree:
            return lower_set.riesz(jax.grad(objective)(y, draw(samples, key)))

        return gradient

    def hessian_product(self, draws: int = 1) -> Callable[[PyTree, PRNGKeyArray], PyTree]:
        """(v, key) -> grad_yy g(x, y; phi) v on a batch drawn with the key, as a direction."""
        objective, samples = self.problem.lower_at(self.x, draws)
        lower_set = self.problem.lower_set

        def product(v: PyTree, key: PRNGKeyArray) -> PyTree:
            batch = draw(samples, key)
            return lower_set.riesz(hessian_product(lambda y: objective(y, batch), self.y, v))

        return product

    def asked(
        self,
        name: str,
        raw: Raw,
        point: PyTree,
        samples: Any,
        key: PRNGKeyArray,
        memory: Memories | None,
    ) -> tuple[PyTree, Memories | None]:
        """raw(point, batch), as the slot's estimator finds it, and the memory after it.

        Without a memory that is the value on a batch that is drawn with the key.
        """
        if self.estimation is None or memory is None:
            return raw(point, draw(samples, key)), memory
        return ask(self.estimation, self.rates, name, raw, point, samples, key, memory)

    def upper_gradient_y(self, batch: Any) -> PyTree:
        """grad_y f(x, y; batch), the right-hand side of the adjoint, as a direction."""
        gradient = grad_y_upper(self.problem, self.x, self.y, batch)
        return self.problem.lower_set.riesz(gradient)

    def direction(self, implicit: PyTree | None, batch: Any, x: PyTree | None = None) -> PyTree:
        """grad_x f(x, y; batch) + w, the hypergradient, as a direction of the upper set.

        `implicit` is w, as `AbstractUpper.update` gets it; None leaves it out. `x` is another point
        than `turn.x`.
        """
        gradient = self.direct
        if gradient is None:
            gradient = grad_x_upper(self.problem, self.x if x is None else x, self.y, batch)
        elif x is not None:
            # The change from turn.x, on the batch, added to the estimate there.
            moved, here = (grad_x_upper(self.problem, at, self.y, batch) for at in (x, self.x))
            gradient = axpy(gradient, 1.0, optax.tree.sub(moved, here))
        if implicit is not None:
            gradient = optax.tree.add(gradient, implicit)
        return self.problem.upper_set.riesz(gradient)

    def direction_oracle(
        self, implicit: PyTree | None, x: PyTree, key: PRNGKeyArray, memory: Memories | None
    ) -> tuple[PyTree, Memories | None]:
        """`direction` at another x on a fresh sample, estimated, and the next memory."""
        problem, samples = self.problem, self.problem.upper_samples
        if memory is None:
            return self.direction(implicit, draw(samples, key), x), None

        def raw(point: PyTree, batch: Any) -> PyTree:
            here, there = point
            return grad_x_upper(problem, here, there, batch, follow=implicit is not None)

        gradient, memory = self.asked("direct", raw, (x, self.y), samples, key, memory)
        if implicit is not None:
            gradient = optax.tree.add(gradient, implicit)
        return problem.upper_set.riesz(gradient), memory

    def promise(self, implicit: PyTree | None, batch: Any) -> Promise:
        """What the last move of x promised, and what came of it.

        With (dx, dy) the last move: -<grad_x f + w, dx> and -(<grad_x f, dx> + <grad_y f, dy>),
        and f (0 for a cohort), with x and y as the outer step found them. Samples are not those dx
        came from, so neither is biased by their noise; for that of y see `slopes_along`. In a
        federation the sums over clients travel with the round.
        """
        if self.moves is None:
            raise ValueError(
                "the last move is kept for upper slots alone that answer `needs_moves` with True."
            )
        moved_x, moved_y, before = self.moves
        # At the y that all clients share: their own y is better for each of them than for all.
        upper, x = self.problem.upper, self.x
        value, direct = jax.jvp(lambda x: upper(x, before, batch), (x,), (moved_x,))
        along = rise_along(lambda y: upper(x, y, batch), moved_y)
        followed = slopes_along(self.problem, before, moved_y, along)
        promised = direct if implicit is None else direct + inner(implicit, moved_x)
        delivered, seeming = (direct + one for one in followed)
        summed = self.problem.upper_set.summed
        told = Promise(*(summed(-n[None]) for n in (promised, delivered, seeming, -value)))
        if self.problem.lower_set.cohorts:
            # f of another cohort is another f: that it is larger says nothing about x.
            told = told._replace(value=jnp.zeros_like(told.value))
        return told

    def lower_cost(
        self,
        projections: Array | int = 0,
        *,
        lower_draws: Array | int = 0,
        upper_draws: Array | int = 0,
        deferred: bool = False,
        memory: Memories | None = None,
    ) -> Cost:
        """What a lower or adjoint slot spent.

        Every projection is one round in a federation, and sends one vector like y. A `deferred`
        projection shares the round at the end of the outer step. `memory` is what the oracles
        returned last.
        """
        rounds = rounds_of(self.problem.lower_set, projections)
        samples = self._samples(lower_draws, upper_draws)
        rounds_now = 0 if deferred else rounds
        return Cost(projections, *samples, rounds=rounds_now, sent_y=rounds, memory=memory)

    def upper_cost(
        self,
        projections: Array | int = 0,
        *,
        rounds: Array | int | None = None,
        lower_draws: Array | int = 0,
        upper_draws: Array | int = 0,
        memory: Memories | None = None,
    ) -> Cost:
        """What an upper slot spent; `rounds` where fewer than its projections cross clients.

        `memory` is what the oracles returned last, where the slot asked them itself.
        """
        crossing = projections if rounds is None else rounds
        sent = rounds_of(self.problem.upper_set, crossing)
        samples = self._samples(lower_draws, upper_draws)
        return Cost(projections, *samples, rounds=sent, sent_x=sent, memory=memory)

    def _samples(
        self, lower_draws: Array | int, upper_draws: Array | int
    ) -> tuple[Array | int, Array | int]:
        upper = upper_draws * batch_size(self.problem.upper_samples)
        return upper, lower_draws * batch_size(self.problem.lower_samples)
