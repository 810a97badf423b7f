"""One projected step: the upper level of AiPOD."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.sets._agreement import bytes_of_one_client
from aipod.slots._compression import check_compression, rounds_both_ways, told
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.upper._base import (
    AbstractUpper,
    check_moves,
    check_one_of,
    optimizer_step,
)
from aipod.slots.upper._gossip import first_alone, next_alone
from aipod.slots.upper._mapping import first_length, mapped, next_length
from aipod.slots.upper._seen import (
    Seen,
    UpperState,
    but_messages,
    by_difference,
    by_direction,
    by_optimizer,
    nothing_seen,
)
from aipod.stepsize import StepSize

# The bytes that the remembered directions of all clients may take by default.
_MEMORY = 2**26


class EveryStep(AbstractUpper):
    """One step, projected every time, as AiPOD does.

        x <- project_x(x - alpha (grad_x f + w))

    With `optimizer`, any Optax transformation u of the projected gradient instead:
    x <- project_x(x + u(P_x (grad_x f + w))). On a set with bounds the gradient mapping takes the
    place of P_x (grad_x f + w).

    **Arguments:**

    - `lr` [alpha]: the step size; or
    - `optimizer`: an `optax.GradientTransformation`.
    - `compression`: "bfloat16" or "float16" for messages of 16 bits, "float8" for 8 and "float4"
        for 4, in both directions where all clients take part.
    - `memory`: where some of the clients make an outer step, whether each remembers its last
        direction, and the absent ones count with theirs. None: where x has no bounds and all these
        directions take at most 64 MiB.
    - `corrected`: in gossip (`aipod.Gossip`), whether a plain step is corrected for what one
        exchange with the neighbours leaves out (exact diffusion). Without it x is moved by
        decentralised SGD, and where clients differ it stops near a solution. An optimiser always
        gets a tracked gradient.

    !!! example
        ```python
        upper = aipod.EveryStep(optimizer=optax.adam(1e-3))
        ```
    """

    lr: StepSize | None = None
    optimizer: optax.GradientTransformation | None = None
    compression: str | None = eqx.field(static=True, default=None)
    memory: bool | None = eqx.field(static=True, default=False)
    corrected: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_moves(self.lr, self.optimizer)
        check_compression(self.compression)
        check_one_of(self.lr, self.optimizer)
        if not (self.memory is None or isinstance(self.memory, bool)):
            raise ValueError(f"memory must be True, False or None, got {self.memory!r}.")

    @property
    def sends_direction(self) -> bool:
        return not self.needs_moves

    @property
    def wire(self) -> str | None:
        return self.compression

    def wire_back(self, problem: Bilevel) -> str | None:
        # With bounds, what clients hear is projected by each of them. A client that was absent has
        # not heard what differences would be added to: x is sent to it as it is.
        both = rounds_both_ways(self.compression) and problem.upper_set.affine
        return self.compression if both and problem.part == 1 else None

    def init(self, problem: Bilevel, x: PyTree) -> PyTree:
        if problem.upper_set.apart:
            return first_alone(problem, self.optimizer, x)
        own = None if self.optimizer is None else self.optimizer.init(x)
        average, part = self._first_memory(problem, x)
        knows = average is not None or (self.compression is not None and problem.part == 1)
        known = optax.tree.zeros_like(x) if knows else None
        difference = self.optimizer is None and problem.upper_set.constrained
        length = None if self.optimizer is None else first_length(problem, x)
        seen = nothing_seen(problem, x, difference=difference)
        heard = None if self.wire_back(problem) is None else optax.tree.zeros_like(x)
        return UpperState(own, seen, known, length=length, heard=heard, average=average, part=part)

    def _first_memory(self, problem: Bilevel, x: PyTree) -> tuple[PyTree, Array | None]:
        """The mean of what is remembered, and how many of the clients take part; None without."""
        clients, part = problem.clients, problem.part
        if clients is None or part == 1 or not problem.upper_set.affine or self.memory is False:
            return None, None
        small = clients * bytes_of_one_client(x) <= _MEMORY
        if not (small or self.memory):
            return None, None
        return optax.tree.zeros_like(x), jnp.asarray(part)

    def common(self, state: PyTree) -> PyTree | None:
        return but_messages(state)

    def needs_each(self, state: PyTree) -> bool:
        return self.compression is not None or state.known is not None

    def seen(self, state: PyTree) -> Seen | None:
        return state.seen

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        if turn.problem.upper_set.apart:
            slope = turn.direction(implicit, batch)
            how = (turn, self.lr, self.optimizer, self.corrected)
            return next_alone(*how, slope, implicit, batch, state)
        direction, known = turn.direction(implicit, batch), state.known
        x, upper_set = turn.x, turn.problem.upper_set.for_round(turn.round_key)
        average, heard = state.average, state.heard
        # Whether the direction is that of all clients by now.
        agreed = average is not None or heard is not None
        if self.compression is not None:
            # A server that keeps nothing of absent clients is told the whole direction, rounded.
            nothing = optax.tree.zeros_like(direction)
            direction = told(direction, nothing if known is None else known, self.compression)
        before = known
        if known is not None:
            known = upper_set.keep_absent(direction, known)
        if average is not None:
            # Absent clients count with what they sent last.
            change = upper_set.tangent(optax.tree.sub(direction, before))
            direction = optax.tree.add(average, change)
            average = axpy(average, state.part, change)
        elif heard is not None and self.compression is not None:
            # The server has the mean; the clients go on from what they hear of it.
            direction = heard = told(upper_set.tangent(direction), heard, self.compression)
        kept = dataclasses.replace(state, known=known, heard=heard, average=average)
        if self.optimizer is not None:
            along, length = cast_like(direction, x), None
            if not agreed:
                along, length = mapped(upper_set, x, direction, state.length)
            new, own = optimizer_step(turn, self.optimizer, along, state.own, implicit, batch)
            seen = by_optimizer(state.seen, turn.problem.upper_set, along, x, new)
            # x + u agrees between clients as P g does: the second projection sends nothing.
            length = next_length(length, along, x, new)
            kept = dataclasses.replace(kept, own=own, seen=seen, length=length)
            return new, kept, turn.upper_cost(2, rounds=1)
        lr = turn.lr(self.lr)
        if agreed or (self.compression is not None and upper_set.affine):
            # The same as below, as all clients have one x: what is averaged is what they have sent.
            mean = direction if agreed else upper_set.tangent(direction)
            new = cast_like(axpy(x, -lr, mean), x)
        else:
            new = cast_like(upper_set.project(axpy(x, -lr, direction)), x)
        if turn.problem.upper_set.constrained:
            seen = by_difference(state.seen, x, new, lr)
        else:
            seen = by_direction(state.seen, direction, lr)
        return new, dataclasses.replace(kept, seen=seen), turn.upper_cost(1)
