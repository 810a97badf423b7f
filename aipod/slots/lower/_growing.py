"""BSA's lower loop: more steps the longer the run lasts, each shorter than the one before."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.keys import subkey
from aipod._misc.tree import axpy, cast_like
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.slots.lower._proxskip import AbstractLower
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate


class GrowingSGD(AbstractLower):
    """t_k = ceil(growth sqrt(k + 1)) projected gradient steps of shrinking size in outer step k.

        y <- project(y - beta_t grad_y g(x, y; phi), x),   beta_t = beta / (1 + decay t)

    **Arguments:**

    - `lr` [beta]: the first step of each loop.
    - `growth`: the number of steps, over sqrt(k + 1).
    - `decay`: how fast the steps shrink; beta mu_g / 2 gives the 2 / (mu_g t) of strong convexity.

    !!! example
        ```python
        lower = aipod.GrowingSGD(lr=0.5, growth=1.0, decay=0.25)
        ```
    """

    lr: StepSize = Curvature()
    growth: float = 0.5
    decay: float = 0.0

    def __check_init__(self) -> None:
        check_rate(self.lr, "lower_lr")
        check_rate(self.growth, "growth")
        if not 0 <= float(self.decay) < float("inf"):
            raise ValueError(f"decay must be 0 or more, got {float(self.decay)}.")

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        return None

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        rate = rates(self.lr)
        lower_set = problem.lower_set.at(x)
        objective, samples = problem.lower_at(x, draws=1)
        steps = jnp.ceil(self.growth * jnp.sqrt(rates.step + 1.0)).astype(jnp.int32)

        def body(t: Array, point: PyTree) -> PyTree:
            step_key = subkey(key, t)
            gradient = jax.grad(objective)(point, draw(samples, step_key))
            length = rate / (1 + self.decay * t)
            moved = axpy(point, -length, lower_set.riesz(gradient))
            return cast_like(lower_set.for_round(subkey(step_key, 1)).project(moved), point)

        y = jax.lax.fori_loop(0, steps, body, y)
        rounds = rounds_of(lower_set, steps)
        spent = steps * batch_size(problem.lower_samples)
        return y, state, Cost(steps, lower_samples=spent, rounds=rounds, sent_y=rounds)
