"""FedNest's loop on y: several local steps between two averages, variance-reduced or plain."""

import equinox as eqx
import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod._misc.tree import axpy, cast_like
from aipod.problem import Bilevel
from aipod.slots._cost import Cost
from aipod.slots._turn import Turn
from aipod.slots.lower._base import AbstractLower
from aipod.stepsize import Curvature, StepSize, check_lr, check_steps


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
        check_lr(self.lr, "lower_lr")
        check_steps(self.steps, "lower_steps (tau)")
        check_steps(self.episodes, "lower_episodes (T)")

    @property
    def draws(self) -> int:
        return self.episodes * (self.steps + self.corrected)

    def common(self, problem: Bilevel) -> bool:
        return True

    def run(self, turn: Turn, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        lr, lower_set = turn.lr(self.lr), turn.lower_set
        slope = turn.lower_gradient(self.draws)

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
                return axpy(point, -lr, direction), None

            end, _ = jax.lax.scan(local, start, keys[3:])
            return cast_like(lower_set.for_round(point_round).project(end), start), None

        y, _ = jax.lax.scan(episode, turn.y, turn.keys(self.episodes))
        averages = self.episodes * (2 if self.corrected else 1)
        return y, state, turn.lower_cost(averages, lower_draws=self.draws)
