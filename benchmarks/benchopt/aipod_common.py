"""What the solver files of aipod for benchmark_bilevel share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def problem_of(f_inner: Any, f_outer: Any, examples: tuple[int, int], size: int) -> aipod.Bilevel:
    """The benchmark's problem: its inner variable is y, its outer variable x."""
    inner, outer = examples
    return aipod.Bilevel(
        upper=lambda x, y, start: f_outer(y, x, start, size),
        lower=lambda x, y, start: f_inner(y, x, start, size),
        upper_samples=Starts(outer, size),
        lower_samples=Starts(inner, size),
    )


class Run:
    """A run in pieces of so many steps, each waited for."""

    def __init__(self, solver: Any, problem: aipod.Bilevel, x: Any, y: Any, seed: int) -> None:
        self.state = solver.init(problem, jnp.asarray(x), jnp.asarray(y))
        key = jax.random.key(seed)

        def advance(state: Any, steps: Any) -> Any:
            return jax.lax.fori_loop(
                0, steps, lambda _, s: solver.traced_step(problem, s, key), state
            )

        self._advance = jax.jit(advance, donate_argnums=0)

    def advance(self, steps: int) -> None:
        self.state = jax.block_until_ready(self._advance(self.state, steps))
