"""FedNest's local loops: several steps between two averages, variance-reduced or plain."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._hypergradient._exact import implicit_term, upper_gradient
from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, cast_like
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.lower._proxskip import AbstractLower
from aipod.slots.upper._every import AbstractUpper, check_between, check_upper_rate, optimizer_step
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate, check_steps


class SVRG(AbstractLower):
    """T episodes of tau unprojected steps on y, each followed by a projection (FedInn).

        q = P grad_y g(x, y; phi_0),   v_0 = y
        v_{i+1} = v_i - beta (grad_y g(x, v_i; phi_i) - grad_y g(x, y; phi_i) + q)
        y <- project(v_tau, x)

    Two rounds of a federation in an episode: the gradient, and y. Not `corrected`, the steps are
    plain local SGD, v_{i+1} = v_i - beta grad_y g(x, v_i; phi_i), and there is one round.

    **Arguments:**

    - `lr` [beta]: the step size.
    - `steps` [tau]: steps between two projections.
    - `episodes` [T]: how often, in one outer step.
    - `corrected`: whether the steps are variance-reduced.

    !!! example
        ```python
        lower = aipod.SVRG(lr=0.02, steps=10, episodes=1)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=10)
    episodes: int = eqx.field(static=True, default=1)
    corrected: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (tau)")
        check_steps(self.episodes, "lower_episodes (T)")

    @property
    def draws(self) -> int:
        return self.episodes * (self.steps + self.corrected)

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return None

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        rate = rates(self.lr)
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=self.draws)

        def slope(point: PyTree, sample_key: PRNGKeyArray) -> PyTree:
            return lower_set.riesz(jax.grad(objective)(point, draw(samples, sample_key)))

        def episode(start: PyTree, episode_key: PRNGKeyArray) -> tuple[PyTree, None]:
            keys = subkeys(episode_key, 3 + self.steps)
            first, mean_round, point_round = keys[:3]
            if self.corrected:
                mean = lower_set.for_round(mean_round).tangent(slope(start, first))

            def local(point: PyTree, sample_key: PRNGKeyArray) -> tuple[PyTree, None]:
                direction = slope(point, sample_key)
                if self.corrected:
                    drift = optax.tree.sub(mean, slope(start, sample_key))
                    direction = optax.tree.add(direction, drift)
                return axpy(point, -rate, direction), None

            end, _ = jax.lax.scan(local, start, keys[3:])
            return cast_like(lower_set.for_round(point_round).project(end), start), None

        y, _ = jax.lax.scan(episode, y, subkeys(key, self.episodes))
        averages = self.episodes * (2 if self.corrected else 1)
        rounds = rounds_of(lower_set, averages)
        spent = self.draws * batch_size(problem.lower_samples)
        return y, state, Cost(averages, lower_samples=spent, rounds=rounds, sent_y=rounds)


class LocalUpper(AbstractUpper):
    """tau unprojected steps on x with one z, then a projection (FedOut).

        h(x) = grad_x f(x, y; xi) + w(x, y, z; phi),   m = P_x h(x),   v_0 = x
        v_{i+1} = v_i - alpha (h_i(v_i) - h_i(x) + m),   x <- project_x(v_tau)

    with fresh samples in every h_i. Two rounds of a federation: h, and x. With tau = 1 the step is
    x - alpha m, the same for all clients, and one round is enough. Not `corrected`, the steps are
    plain, v_{i+1} = v_i - alpha h_i(v_i), and there is one round.

    **Arguments:**

    - `lr` [alpha]: the step size; may be left out where tau = 1 and there is an optimiser.
    - `steps` [tau]: steps between two projections.
    - `corrected`: whether the steps are variance-reduced.
    - `optimizer`: an `optax.GradientTransformation` of the pseudo-gradient x - project_x(v_tau),
        as in `Delayed`.

    !!! example
        ```python
        upper = aipod.LocalUpper(lr=0.01, steps=5)
        ```
    """

    lr: StepSize | None = None
    steps: int = eqx.field(static=True, default=1)
    corrected: bool = eqx.field(static=True, default=True)
    optimizer: optax.GradientTransformation | None = None

    def __check_init__(self) -> None:
        check_steps(self.steps, "upper_steps (tau)")
        check_upper_rate(self.lr)
        if self.lr is None and self.optimizer is None:
            raise ValueError("give upper_lr, or an optimiser as upper_optimizer=.")
        check_between(self.lr, self.steps)

    def update(
        self, turn: Turn, z: PyTree, implicit: PyTree, batch: Any, state: PyTree
    ) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        rate, upper_set = rates(self.lr), problem.upper_set
        keys = subkeys(key, 2 + self.steps)
        mean_round, point_round = keys[:2]

        def slope(point: PyTree, sample_key: PRNGKeyArray) -> PyTree:
            upper_key, lower_key = subkeys(sample_key, 2)
            xi = draw(problem.upper_samples, upper_key)
            phi = draw(problem.lower_samples, lower_key)
            part = implicit_term(problem, point, y, z, xi, phi)
            return upper_set.riesz(optax.tree.add(upper_gradient(problem, point, y, xi), part))

        here = upper_set.riesz(optax.tree.add(upper_gradient(problem, x, y, batch), implicit))
        mean = upper_set.for_round(mean_round).tangent(here) if self.corrected else here

        def local(point: PyTree, sample_key: PRNGKeyArray) -> tuple[PyTree, None]:
            direction = slope(point, sample_key)
            if self.corrected:
                drift = optax.tree.sub(mean, slope(x, sample_key))
                direction = optax.tree.add(direction, drift)
            return axpy(point, -rate, direction), None

        # At x itself the first step needs no sample of its own: h_0(x) - h_0(x) + m = m.
        moved = axpy(x, -rate, mean)
        if self.steps > 1:
            moved, _ = jax.lax.scan(local, moved, keys[3:])
        new = cast_like(upper_set.for_round(point_round).project(moved), x)
        averages = 2 if self.corrected and self.steps > 1 else 1
        rounds = rounds_of(upper_set, averages)
        draws = self.steps - 1
        cost = Cost(
            averages,
            upper_samples=draws * batch_size(problem.upper_samples),
            lower_samples=draws * batch_size(problem.lower_samples),
            rounds=rounds,
            sent_x=rounds,
        )
        if self.optimizer is not None:
            # The clients agree on x - new already: this projection sends nothing.
            along = optax.tree.sub(x, new)
            new, state = optimizer_step(problem, self.optimizer, along, state, x)
            cost = dataclasses.replace(cost, projections=averages + 1)
        return new, state, cost
