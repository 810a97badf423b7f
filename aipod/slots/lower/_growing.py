"""BSA's lower loop: more steps the longer the run lasts, each shorter than the one before."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod._misc.keys import round_key, subkey
from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import Curvature, StepSize, check_lr, check_not_negative, check_positive


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
        check_lr(self.lr, "lower_lr")
        check_positive(self.growth, "growth")
        check_not_negative(self.decay, "decay")

    def common(self, problem: Bilevel) -> bool:
        return True

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lr, lower_set, key = turn.lr(self.lr), turn.lower_set, turn.key
        gradient = turn.lower_gradient()
        steps = jnp.ceil(self.growth * jnp.sqrt(turn.step + 1.0)).astype(jnp.int32)

        def body(t: Array, point: PyTree) -> PyTree:
            length = lr / (1 + self.decay * t)
            moved = axpy(point, -length, gradient(point, subkey(key, t)))
            chosen = lower_set.for_round(round_key(key, t))
            return cast_like(chosen.project(moved), point)

        y = jax.lax.fori_loop(0, steps, body, turn.y)
        return y, state, turn.lower_cost(steps, lower_draws=steps)
