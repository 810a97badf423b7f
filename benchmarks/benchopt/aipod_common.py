"""What the solver files of aipod for benchmark_bilevel share."""

from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_utils.stochastic_jax_solver import StochasticJaxSolver

import aipod


class Starts(aipod.AbstractSampler):
    """A batch is the start of its slice; fixed minibatches in epochs."""

    starts: aipod.Minibatches
    examples: int

    def __init__(self, examples: int, size: int) -> None:
        if examples % size:
            raise ValueError(f"batch_size={size} must divide the {examples} examples.")
        self.starts = aipod.Minibatches(np.arange(0, examples, size), 1, epochs=True)
        self.examples = examples

    @property
    def pieces(self) -> int:
        return self.starts.pieces

    @property
    def epochs(self) -> bool:
        return True

    @property
    def size(self) -> int:
        return self.examples // self.pieces

    def number(self, key: Any, word: Any, count: Any) -> Any:
        return self.starts.number(key, word, count)

    def on(self, number: Any, function: Any) -> Any:
        return self.starts.on(number, lambda start: function(start[0]))

    def __call__(self, key: Any) -> Any:
        return self.starts(key)[0]


class AipodSolver(StochasticJaxSolver):
    """A solver of aipod on the benchmark's oracles; a subclass answers `method`."""

    requirements: ClassVar = ["jax", "pip::aipod-jax"]
    parameters: ClassVar = {
        "step_size": [0.3],
        "outer_ratio": [1.0],
        "batch_size": [64],
        **StochasticJaxSolver.parameters,
    }
    going = None

    @abstractmethod
    def method(self, lower: float, upper: float) -> Any:
        """The solver with these step sizes of y and of x."""

    def init(self) -> None:
        self.inner_var, self.outer_var = self.inner_var0, self.outer_var0
        if self.going is None:
            # Once: what the warm-up compiles serves the run that is timed.
            solver = self.method(self.step_size, self.step_size / self.outer_ratio)
            self.going = Run(solver, self.problem(), self.random_state)
        self.going.start(self.outer_var, self.inner_var)

    def problem(self) -> Any:
        """The benchmark's problem: its inner variable is y, its outer variable x."""
        return aipod.Bilevel(
            upper=lambda x, y, start: self.f_outer(y, x, start=start),
            lower=lambda x, y, start: self.f_inner(y, x, start=start),
            upper_samples=Starts(self.n_outer_samples, self.batch_size_outer),
            lower_samples=Starts(self.n_inner_samples, self.batch_size_inner),
        )

    def get_step(self, inner_sampler: Any, outer_sampler: Any) -> Any:
        # The base class compiles a step of its own kind; aipod's is compiled in `Run`.
        return lambda carry, _: (carry, None)

    def run(self, callback: Any) -> None:
        self.init()
        while callback():
            self.inner_var, self.outer_var = self.going.advance(self.eval_freq)


class Run:
    """A run in pieces of so many steps, each waited for."""

    def __init__(self, solver: Any, problem: Any, seed: int) -> None:
        key = jax.random.key(seed)

        def advance(state: Any, steps: Any) -> Any:
            return jax.lax.fori_loop(
                0, steps, lambda _, s: solver.traced_step(problem, s, key), state
            )

        self._advance = jax.jit(advance, donate_argnums=0)
        self._init = lambda x, y: solver.init(problem, jnp.array(x), jnp.array(y))
        self.state: Any = None

    def start(self, x: Any, y: Any) -> None:
        self.state = self._init(x, y)

    def advance(self, steps: int) -> tuple[Any, Any]:
        """(y, x) after so many steps more, copied: the next piece reuses the state's memory."""
        self.state = jax.block_until_ready(self._advance(self.state, steps))
        return jnp.array(self.state.y), jnp.array(self.state.x)
