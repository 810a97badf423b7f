"""An algorithm of one's own with its types, as a stranger would write it: public names alone.

`test_extend.py` runs this file and has `mypy --strict` read it; it is no part of the package.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, PRNGKeyArray, PyTree

import aipod
from aipod.stepsize import Rates, StepSize


class Restarted(aipod.AbstractLower):
    """Projected steps with Nesterov's momentum, which begins anew in every outer step."""

    lr: StepSize = aipod.Curvature()
    momentum: float = 0.5
    steps: int = eqx.field(static=True, default=5)

    def init(self, problem: aipod.Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return jnp.zeros((), jnp.int32)

    @property
    def draws(self) -> int:
        return self.steps

    def run(self, turn: aipod.Turn, state: PyTree) -> tuple[PyTree, PyTree, aipod.Cost]:
        lr: Array = turn.lr(self.lr)
        gradient = turn.lower_gradient(self.steps)
        lower_set: aipod.AbstractSet = turn.lower_set

        def step(
            carry: tuple[PyTree, PyTree], keys: tuple[PRNGKeyArray, PRNGKeyArray]
        ) -> tuple[tuple[PyTree, PyTree], None]:
            y, before = carry
            ahead = jax.tree.map(lambda a, b: a + self.momentum * (a - b), y, before)
            moved = jax.tree.map(lambda a, d: a - lr * d, ahead, gradient(ahead, keys[0]))
            return (lower_set.for_round(keys[1]).project(moved), y), None

        keys = turn.keys(2 * self.steps).reshape(2, self.steps)
        (y, _), _ = jax.lax.scan(step, (turn.y, turn.y), (keys[0], keys[1]))
        return y, state + 1, turn.lower_cost(self.steps, lower_draws=self.steps)

    def own(self, state: PyTree) -> PyTree:
        return False


class Local(aipod.AbstractLower):
    """One corrected step whose projection shares the round at the end of the outer step."""

    lr: float = 0.1

    @property
    def deferred(self) -> bool:
        return True

    def init(self, problem: aipod.Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, y)

    def run(self, turn: aipod.Turn, state: PyTree) -> tuple[PyTree, PyTree, aipod.Cost]:
        slope = turn.lower_gradient()(turn.y, turn.key)
        y = jax.tree.map(lambda y, d, r: y - self.lr * (d - r), turn.y, slope, state)
        return y, state, turn.lower_cost(1, lower_draws=1, deferred=True)

    def settle(self, turn: aipod.Turn, state: PyTree) -> tuple[PyTree, PyTree]:
        chosen = turn.lower_set.for_round(turn.round_key)
        y = chosen.project_corrected(turn.y, jax.tree.map(lambda r: self.lr * r, state))
        new = jax.tree.map(lambda r, a, b: r + (a - b) / self.lr, state, y, turn.y)
        return y, chosen.keep_absent(new, state)


class Richardson(aipod.AbstractAdjoint):
    """Warm gradient steps on 1/2 z'Gz - z'grad_y f."""

    lr: StepSize = aipod.Curvature()
    steps: int = eqx.field(static=True, default=5)

    def init(self, problem: aipod.Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, y)

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps, 0

    def solve(
        self, turn: aipod.Turn, upper_batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, aipod.Cost]:
        lr, product = turn.lr(self.lr), turn.hessian_product(self.steps)
        slope = turn.upper_gradient_y(upper_batch)

        def step(z: PyTree, key: PRNGKeyArray) -> tuple[PyTree, None]:
            moved = jax.tree.map(lambda z, h, b: z - lr * (h - b), z, product(z, key), slope)
            return turn.lower_set.tangent(moved), None

        z, _ = jax.lax.scan(step, state, turn.keys(self.steps))
        return z, z, turn.lower_cost(self.steps, lower_draws=self.steps)


class Momentum(aipod.AbstractUpper):
    """Optax moves x."""

    lr: float = 0.1
    optimizer: optax.GradientTransformation = optax.sgd(1.0, momentum=0.5)

    def update(
        self, turn: aipod.Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, aipod.Cost]:
        upper_set = turn.problem.upper_set
        gradient = jax.grad(turn.problem.upper)(turn.x, turn.y, batch)
        along = upper_set.tangent(upper_set.riesz(optax.tree.add(gradient, implicit)))
        change, state = self.optimizer.update(optax.tree.scale(self.lr, along), state, turn.x)
        x = upper_set.project(optax.apply_updates(turn.x, change))
        return x, state, turn.upper_cost(2, rounds=1)


class Palindromes(aipod.AbstractSet):
    """Vectors that read the same from both ends, around a centre."""

    centre: Array

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.tangent(y) + self.anchor()

    def tangent(self, v: PyTree) -> PyTree:
        return (v + v[::-1]) / 2

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return (self.centre - self.centre[::-1]) / 2

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return y - self.project(y)


class Shifted(aipod.AbstractSampler):
    """Data with one common shift."""

    data: Array
    size: int = eqx.field(static=True, default=4)

    def __call__(self, key: PRNGKeyArray) -> Array:
        return self.data + 0.1 * jax.random.normal(key)

    def expected(self) -> Array:
        return self.data


def upper(x: Array, y: Array, batch: Array) -> Array:
    return jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2)


def lower(x: Array, y: Array, batch: Array) -> Array:
    return 0.5 * jnp.sum((y - x) ** 2) + 0.05 * jnp.sum((y - batch) ** 2)


problem = aipod.Bilevel(
    upper,
    lower,
    lower_set=Palindromes(jnp.array([1.0, 0.0, 0.0, -1.0])),
    lower_samples=Shifted(jnp.zeros(4)),
)
solvers = {
    "momentum": aipod.Alternating(Restarted(), Richardson(), Momentum()),
    "one round": aipod.Alternating(Local(), Richardson(), aipod.EveryStep(lr=0.1)),
}


def stationarity(name: str, steps: int) -> float:
    start = jnp.zeros(4)
    found: aipod.Solution = aipod.solve(
        problem, solvers[name], start, start, steps, key=jax.random.key(0)
    )
    return float(aipod.stationarity(problem, found.x, start))


RATES = Rates(jnp.zeros((), jnp.int32), None)


def adjoint_alone() -> tuple[PyTree, Array | int]:
    """A slot tried by itself, in a turn made by hand."""
    start = jnp.zeros(4)
    turn = aipod.Turn(problem, start, start, RATES, jax.random.key(0))
    z, _, cost = Richardson(lr=0.1, steps=200).solve(turn, None, start)
    return z, cost.projections
