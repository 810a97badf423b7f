"""FedBiOAcc's local steps: those of SimFBO, along recursive momenta."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._joint import (
    AbstractJoint,
    Sums,
    check_joint,
    first_joint,
    joint_directions,
    local_rates,
    round_means,
)
from aipod.slots.lower import settles
from aipod.stepsize import Curvature, StepSize, check_lr


class RecursiveState(eqx.Module):
    """z and the last q, as in `JointState`; the momenta v, and where each client found its own."""

    z: PyTree
    q: Sums
    momentum: Sums
    last: Sums


class RecursiveSteps(AbstractJoint):
    """tau local steps on y, z and x at once, each along a recursive momentum (STORM).

        d_i = the three directions of `JointSteps` on a fresh batch
        v_i <- d_i(point_i) + (1 - a) (v_i - d_i(last point_i)),   point_i <- point_i - eta v_i

    where the last point is the one at which v_i was found before, and v_i = d_i at first. After
    tau of them the points and the momenta are averaged, in one round.

    **Arguments:** those of `JointSteps` but for `server_lr` and `radius`, and

    - `weight` [a]: how much the newest directions count, a number or an Optax schedule.

    !!! example
        ```python
        adjoint = RecursiveSteps(steps=5, lr=0.1, lower_lr=0.1, upper_lr=0.01, weight=0.1)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    lr: StepSize = Curvature()
    lower_lr: StepSize = Curvature()
    upper_lr: StepSize | None = None
    weight: StepSize = 0.1

    def __check_init__(self) -> None:
        check_joint(self.steps, self.lr, None)
        check_lr(self.weight, "momentum (a)")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        first = first_joint(optax.tree.zeros_like(y), x)
        return RecursiveState(first.z, first.q, first.q, Sums(y, first.z, x))

    def common(self, state: PyTree) -> PyTree:
        mask = jax.tree.map(lambda _: True, state)
        return dataclasses.replace(mask, last=jax.tree.map(lambda _: False, state.last))

    def own(self, state: PyTree) -> PyTree:
        mask = jax.tree.map(lambda _: False, state)
        return dataclasses.replace(mask, last=jax.tree.map(lambda _: True, state.last))

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, start = turn.problem, Sums(turn.y, state.z, turn.x)
        rates = local_rates(turn, self.lower_lr, self.lr, self.upper_lr)
        kept = 1 - jnp.minimum(turn.lr(self.weight), 1.0)

        def local(carry: tuple[Sums, ...], inputs: tuple[Any, PRNGKeyArray]) -> tuple[Any, None]:
            totals, momentum, last = carry
            number, key = inputs
            parts = zip(start, rates, totals, strict=True)
            point = Sums(*(axpy(begin, -rate, total) for begin, rate, total in parts))
            new, old = (joint_directions(problem, at, key) for at in (point, last))
            # Before the first of all steps there is no momentum to keep.
            share = jnp.where((turn.step == 0) & (number == 0), 0.0, kept)
            momentum = cast_like(axpy(new, share, optax.tree.sub(momentum, old)), momentum)
            return (optax.tree.add(totals, momentum), momentum, cast_like(point, last)), None

        inputs = jnp.arange(self.steps), turn.keys(self.steps)
        first = optax.tree.zeros_like(start), state.momentum, state.last
        (totals, momentum, last), _ = jax.lax.scan(local, first, inputs)
        q, momentum = round_means(turn, totals), round_means(turn, momentum)
        # One batch of the upper level is counted for every outer step already.
        cost = turn.lower_cost(
            settles(problem.lower_set),
            lower_draws=6 * self.steps,
            upper_draws=4 * self.steps - 1,
            deferred=True,
        )
        if self.steps > 1 and problem.upper_set.federated:
            # After a single step the mean of the momenta is q, which travels anyway.
            cost = dataclasses.replace(cost, sent_x=cost.sent_x + 1, sent_y=cost.sent_y + 2)
        kept_state = RecursiveState(state.z, cast_like(q, start), cast_like(momentum, start), last)
        return state.z, kept_state, cost

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        z = axpy(state.z, -turn.lr(self.lr), state.q.z)
        return dataclasses.replace(state, z=z)
