"""SimFBO's local steps: y, z and x at once, on each client by itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, cast_like, inner, scaled
from aipod.problem import (
    Bilevel,
    draw,
    grad_x_upper,
    grad_y_upper,
    hessian_product,
    implicit_term,
)
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.adjoint._base import AbstractAdjoint
from aipod.slots.lower import settles
from aipod.stepsize import Curvature, StepSize, check_lr, check_positive, check_steps


class Sums(NamedTuple):
    """q: for each variable the sum of its local directions, averaged over clients."""

    y: PyTree
    z: PyTree
    x: PyTree


class JointState(eqx.Module):
    """z, and the last q."""

    z: PyTree
    q: Sums


def local_rates(
    turn: Turn, lower_lr: StepSize, adjoint_lr: StepSize, upper_lr: StepSize | None
) -> Sums:
    """The sizes of local steps in this outer step; without one for x, x is fixed in them."""
    still = jnp.zeros(()) if upper_lr is None else turn.lr(upper_lr)
    return Sums(turn.lr(lower_lr), turn.lr(adjoint_lr), still)


def local_sums(
    turn: Turn,
    start: Sums,
    rates: Sums,
    steps: int,
    directions: Callable[[Bilevel, Sums, PRNGKeyArray], Sums],
) -> Sums:
    """q after so many local steps from `start`, all along directions(problem, point, key)."""
    problem = turn.problem

    def local(totals: Sums, key: PRNGKeyArray) -> tuple[Sums, None]:
        parts = zip(start, rates, totals, strict=True)
        point = Sums(*(axpy(begin, -rate, total) for begin, rate, total in parts))
        return cast_like(optax.tree.add(totals, directions(problem, point, key)), totals), None

    totals, _ = jax.lax.scan(local, optax.tree.zeros_like(start), turn.keys(steps))
    return cast_like(round_means(turn, totals), start)


def round_means(turn: Turn, totals: Sums) -> Sums:
    """The averages over clients, the same clients in all three: they send one message."""
    sets = (turn.problem.lower_set, turn.problem.upper_set)
    lower, upper = (s.for_round(turn.round_key) for s in sets)
    return Sums(lower.tangent(totals.y), lower.tangent(totals.z), upper.tangent(totals.x))


def joint_directions(problem: Bilevel, point: Sums, key: PRNGKeyArray) -> Sums:
    """Of one client's local step in y, z and x, each on samples of its own."""
    y, z, x = point
    keys = subkeys(key, 5)
    of_y, of_z, of_x = (draw(problem.lower_samples, k) for k in keys[:3])
    slope_of, direct_of = (draw(problem.upper_samples, k) for k in keys[3:])
    slope = jax.grad(problem.lower, argnums=1)(x, y, of_y)
    product = hessian_product(lambda t: problem.lower(x, t, of_z), y, z)
    left = optax.tree.sub(product, grad_y_upper(problem, x, y, slope_of))
    implicit = implicit_term(problem, x, y, z, direct_of, of_x)
    along = optax.tree.add(grad_x_upper(problem, x, y, direct_of), implicit)
    riesz = problem.lower_set.riesz
    return Sums(riesz(slope), riesz(left), problem.upper_set.riesz(along))


class AbstractJoint(AbstractAdjoint):
    """Local steps of y, z and x at once, whose sums q travel in the round that ends the step."""

    def common(self, state: PyTree) -> PyTree:
        return jax.tree.map(lambda _: True, state)

    def told(self, state: PyTree) -> PyTree:
        return state.q

    @property
    def deferred(self) -> bool:
        return True


def first_joint(z: PyTree, x: PyTree) -> JointState:
    """The state before the first outer step."""
    zero = optax.tree.zeros_like(z)
    return JointState(z, Sums(zero, zero, optax.tree.zeros_like(x)))


def check_joint(steps: int, lr: StepSize, server_lr: StepSize | None) -> None:
    """Raises `ValueError` unless these are a number of local steps and their sizes."""
    check_steps(steps, "local_steps (tau)")
    check_lr(lr, "adjoint_lr")
    if server_lr is not None:
        check_lr(server_lr, "adjoint_server_lr")


class JointSteps(AbstractJoint):
    """tau local steps on y, z and x at once; the sums of their directions are averaged.

        y_i <- y_i - eta_y grad_y g_i(x_i, y_i; phi)
        z_i <- z_i - eta_z (grad_yy g_i(x_i, y_i; phi') z_i - grad_y f_i(x_i, y_i; xi'))
        x_i <- x_i - eta_x (grad_x f_i(x_i, y_i; xi) - grad_xy g_i(x_i, y_i; phi'') z_i)

    all three from the same (x_i, y_i, z_i). With q the average over clients of the sum of a
    variable's tau directions, at the end of the outer step

        z <- P_r(z - gamma_z q_z),   P_r(z) = min(1, r / |z|) z

    The slots of y and x, `ToldLower` and `ToldUpper`, are told q_y and q_x. All three averages
    share one round.

    **Arguments:**

    - `steps` [tau]: local steps.
    - `lr` [eta_z], `lower_lr` [eta_y], `upper_lr` [eta_x]: their sizes; `upper_lr=None` keeps x
        fixed in them.
    - `server_lr` [gamma_z]: the server's step on z; by default eta_z.
    - `radius` [r]: the largest norm of z; by default there is none.

    !!! example
        ```python
        adjoint = JointSteps(steps=5, lr=0.1, lower_lr=0.1, upper_lr=0.01)
        ```
    """

    steps: int = eqx.field(static=True, default=1)
    lr: StepSize = Curvature()
    lower_lr: StepSize = Curvature()
    upper_lr: StepSize | None = None
    server_lr: StepSize | None = None
    radius: float | None = None

    def __check_init__(self) -> None:
        check_joint(self.steps, self.lr, self.server_lr)
        if self.radius is not None:
            check_positive(self.radius, "radius (r)")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return first_joint(optax.tree.zeros_like(y), x)

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        q = local_sums(
            turn, Sums(turn.y, state.z, turn.x), self._rates(turn), self.steps, joint_directions
        )
        # One batch of the upper level is counted for every outer step already.
        cost = turn.lower_cost(
            settles(turn.problem.lower_set),
            lower_draws=3 * self.steps,
            upper_draws=2 * self.steps - 1,
            deferred=True,
        )
        return state.z, JointState(state.z, q), cost

    def _rates(self, turn: Turn) -> Sums:
        return local_rates(turn, self.lower_lr, self.lr, self.upper_lr)

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        rate = turn.lr(self.lr if self.server_lr is None else self.server_lr)
        z = axpy(state.z, -rate, state.q.z)
        if self.radius is not None:
            # All clients have the same z, and each takes the norm of its own.
            size = jnp.sqrt(inner(z, z, per_client=turn.problem.lower_set.per_client))
            shrink = jnp.minimum(1.0, self.radius / jnp.where(size > 0, size, 1.0))
            z = cast_like(scaled(shrink, z), z)
        return JointState(z, state.q)
