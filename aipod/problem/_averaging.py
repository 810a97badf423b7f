"""Averages several draws of a sampler into one batch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import subkeys
from aipod.problem._bilevel import Bilevel
from aipod.problem._composite import Objective
from aipod.problem._samplers import AbstractSampler, Sampler, batch_size, is_random


class _Stacked(AbstractSampler):
    """Several draws of a sampler at once, on a leading axis."""

    samples: Sampler
    draws: int = eqx.field(static=True)

    @property
    def size(self) -> int:
        return self.draws * batch_size(self.samples)

    @property
    def random(self) -> bool:
        return is_random(self.samples)

    def __call__(self, key: PRNGKeyArray) -> Any:
        return jax.vmap(self.samples)(subkeys(key, self.draws))


class _Mean(eqx.Module):
    """An objective's mean over stacked batches."""

    objective: Objective

    def __call__(self, x: PyTree, y: PyTree, batches: Any) -> Array:
        return jnp.mean(jax.vmap(lambda batch: self.objective(x, y, batch))(batches))


def averaged(problem: Bilevel, draws: int) -> Bilevel:
    """The same problem, with each sample averaged over `draws` draws."""

    def larger(objective: Objective, samples: Sampler | None) -> tuple[Objective, Sampler | None]:
        if samples is None or draws == 1:
            return objective, samples
        return _Mean(objective), _Stacked(samples, draws)

    upper, upper_samples = larger(problem.upper, problem.upper_samples)
    lower, lower_samples = larger(problem.lower, problem.lower_samples)
    return Bilevel(upper, lower, problem.upper_set, problem.lower_set, upper_samples, lower_samples)
