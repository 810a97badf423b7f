"""How y follows x: the lower slot."""

import abc

import equinox as eqx
import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._random import subkey
from aipod._tree import axpy, cast_like
from aipod.cost import Cost, rounds_of
from aipod.problem import Bilevel
from aipod.proxskip import check_probability, proxskip, step_keys
from aipod.sampling import batch_size, draw
from aipod.stepsize import Curvature, Rates, StepSize, check_rate, check_steps


class AbstractLower(eqx.Module):
    """The slot that moves y towards y*(x) while x is fixed."""

    lr: eqx.AbstractVar[StepSize]

    @abc.abstractmethod
    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """What is kept besides y from one outer step to the next."""

    @abc.abstractmethod
    def run(
        self,
        problem: Bilevel,
        x: PyTree,
        y: PyTree,
        state: PyTree,
        rates: Rates,
        *,
        key: PRNGKeyArray,
    ) -> tuple[PyTree, PyTree, Cost]:
        """The next y, the next state, and what it cost."""


class ProjectedSGD(AbstractLower):
    """S projected stochastic gradient steps (`update-ys`).

        y <- project(y - beta grad_y g(x, y; phi), x)

    **Arguments:**

    - `lr` [beta]: the step size.
    - `steps` [S]: steps per outer step, each on a fresh sample.

    !!! example
        ```python
        lower = aipod.ProjectedSGD(lr=0.01, steps=5)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return None

    def run(
        self,
        problem: Bilevel,
        x: PyTree,
        y: PyTree,
        state: PyTree,
        rates: Rates,
        *,
        key: PRNGKeyArray,
    ) -> tuple[PyTree, PyTree, Cost]:
        rate = rates(self.lr)
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=self.steps)

        def body(point: PyTree, draw_key: PRNGKeyArray) -> tuple[PyTree, None]:
            gradient = jax.grad(objective)(point, draw(samples, draw_key))
            chosen = lower_set.for_round(subkey(draw_key, 1))
            new = chosen.project(axpy(point, -rate, lower_set.riesz(gradient)))
            return cast_like(new, point), None

        y, _ = jax.lax.scan(body, y, step_keys(key, self.steps)[1])
        spent = self.steps * batch_size(problem.lower_samples)
        rounds = rounds_of(lower_set, self.steps)
        cost = Cost(self.steps, lower_samples=spent, rounds=rounds, sent_y=rounds)
        return y, state, cost


class ProxSkip(AbstractLower):
    """S corrected stochastic gradient steps, each projected with probability p only.

        y_hat = y - beta (grad_y g(x, y; phi) - r)                                    (`update-z`)
        with probability p:  y <- project(y_hat - (beta / p) r, x)                  (`update-yz1`)
                             r <- r + (p / beta) (y - y_hat)                        (`update-yz2`)
        otherwise:           y <- y_hat

    r and y are carried over from one outer step to the next; r tends to grad_y g(x, y*(x)), so
    the skipped projections leave no error behind.

    **Arguments:**

    - `lr` [beta]: the step size, at most 1 / l_g1: the skipped steps see the whole space.
    - `steps` [S]: steps per outer step.
    - `prob` [p]: how often to project.

    !!! example
        ```python
        lower = aipod.ProxSkip(lr=0.01, steps=5, prob=0.3)
        ```
    """

    lr: StepSize = Curvature()
    steps: int = eqx.field(static=True, default=5)
    prob: float = 0.3

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (S)")
        check_probability(self.prob, "lower_prob (p)")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return optax.tree.zeros_like(y)

    def run(
        self,
        problem: Bilevel,
        x: PyTree,
        y: PyTree,
        state: PyTree,
        rates: Rates,
        *,
        key: PRNGKeyArray,
    ) -> tuple[PyTree, PyTree, Cost]:
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=self.steps)

        def gradient(point: PyTree, draw_key: PRNGKeyArray) -> PyTree:
            return lower_set.riesz(jax.grad(objective)(point, draw(samples, draw_key)))

        y, correction, projections = proxskip(
            gradient,
            lower_set,
            y,
            state,
            rate=rates(self.lr),
            probability=self.prob,
            steps=self.steps,
            key=key,
        )
        spent = self.steps * batch_size(problem.lower_samples)
        rounds = rounds_of(lower_set, projections)
        cost = Cost(projections, lower_samples=spent, rounds=rounds, sent_y=rounds)
        return y, correction, cost
