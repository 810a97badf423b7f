"""Momentum where the averages meet: an optimiser moves what an outer step ends with."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, inner
from aipod.sets import AbstractSet
from aipod.stepsize import check_not_negative, check_share


class Velocity(NamedTuple):
    """The state of `restarted_momentum`.

    - `trace`: the sum of past gradients, older ones counting less; minus the direction of travel.
    - `age`: the steps since the velocity was last forgotten.
    """

    trace: PyTree
    age: Array


def restarted_momentum(decay: float = 0.95, growth: float = 3.0) -> optax.GradientTransformation:
    """Nesterov's momentum with steps of size 1 that forgets its velocity when that points uphill.

        if <v, g> < 0:   v <- 0,  k <- 0
        v <- g + m_k v,   update = -(g + m_(k+1) v),   k <- k + 1

    with m_k = min(k / (k + growth), decay).

    g is the gradient; in E3-AiPOD it is y - ybar, the way back from the average of the clients. The
    rule is the gradient restart of O'Donoghue and Candes (Foundations of Computational Mathematics,
    2015). Momentum that grows with k stays mild where restarts are frequent, as in noise.

    **Arguments:**

    - `decay`: how much of the velocity is kept from one step to the next, at most.
    - `growth`: how slowly momentum grows; with 0 it is `decay` from the first step on.

    !!! example
        ```python
        solver = aipod.E3AiPOD(lower_optimizer=aipod.restarted_momentum(0.8))
        ```
    """
    check_share(decay, "restarted_momentum: decay")
    check_not_negative(growth, "restarted_momentum: growth")
    return _restarted_momentum(float(decay), float(growth))


# One object for each pair of arguments: solvers made with it are equal.
@functools.cache
def _restarted_momentum(decay: float, growth: float) -> optax.GradientTransformation:
    def kept(age: Array) -> Array:
        return jnp.minimum(age / (age + growth), decay) if growth else jnp.full_like(age, decay)

    def init(params: PyTree) -> Velocity:
        kind = jnp.result_type(float, *jax.tree.leaves(params))
        return Velocity(optax.tree.zeros_like(params), jnp.zeros((), kind))

    def update(
        updates: PyTree, state: Velocity, params: PyTree | None = None
    ) -> tuple[PyTree, Velocity]:
        uphill = inner(state.trace, updates) < 0
        age = jnp.where(uphill, 0.0, state.age)
        trace = axpy(updates, jnp.where(uphill, 0.0, kept(age)), state.trace)
        change = optax.tree.scale(-1, axpy(updates, kept(age + 1), trace))
        return change, Velocity(trace, age + 1)

    return optax.GradientTransformation(init, update)


def check_mover(optimizer: Any, name: str) -> None:
    """Raises `ValueError` unless `optimizer` is an Optax transformation or None."""
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation, such as "
            f"aipod.restarted_momentum() or optax.sgd(1.0), got {type(optimizer).__name__}."
        )


class Mover(eqx.Module):
    """Moves a point by an optimiser, where an outer step would end with its projection.

        point <- start + optimiser(start - projected)

    The optimiser rests where start and projection agree, so the fixed points stay. `optax.sgd(1.0)`
    ends with the projection itself. In a federation all clients have the same start and the same
    average: one row is looked at, and the optimiser's state has one. Without a server every client
    has an optimiser of its own.
    """

    optimizer: optax.GradientTransformation
    together: bool = eqx.field(static=True)
    apart: bool = eqx.field(static=True, default=False)

    @staticmethod
    def of(
        name: str,
        given: optax.GradientTransformation | None,
        constraint: AbstractSet,
        default: optax.GradientTransformation,
    ) -> "Mover | None":
        """By default momentum where clients meet, and elsewhere none; `name` is the argument's."""
        if given is not None and constraint.constrained and not constraint.together:
            raise ValueError(
                f"{name}= is for federations and lower levels without constraints: on a "
                f"{type(constraint).__name__} its steps would leave the set. Leave it out."
            )
        if constraint.apart:
            return Mover(given or default, together=False, apart=True)
        if given is not None:
            return Mover(given, constraint.together)
        return Mover(default, True) if constraint.together else None

    def _rows(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:1], tree) if self.together else tree

    def init(self, point: PyTree) -> PyTree:
        made: Any = self.optimizer.init
        return jax.vmap(made)(point) if self.apart else made(self._rows(point))

    def __call__(self, start: PyTree, projected: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The next point, and the optimiser's state."""
        before = self._rows(start)
        back = optax.tree.sub(before, self._rows(projected))
        moved: Any = self.optimizer.update
        update, state = (jax.vmap(moved) if self.apart else moved)(back, state, before)
        # From the projection on, which all clients share even where the first start was not common.
        new = jax.tree.map(lambda p, u, b: (p + (u + b)).astype(p.dtype), projected, update, back)
        return new, state
