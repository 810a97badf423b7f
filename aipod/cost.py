"""What a step spends: the counts that the paper's complexity bounds are about."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


class Cost(eqx.Module):
    """What one slot spent in one outer step."""

    projections: Array | int = 0
    upper_samples: Array | int = 0
    lower_samples: Array | int = 0


class Counts(eqx.Module):
    """Running totals inside the compiled loop. `solve` moves them to Python's integers in time."""

    upper_projections: Array
    lower_projections: Array
    adjoint_projections: Array
    upper_samples: Array
    lower_samples: Array

    @staticmethod
    def zero() -> "Counts":
        return Counts(*(jnp.zeros((), jnp.int32) for _ in range(5)))

    @property
    def projections(self) -> Array:
        return self.upper_projections + self.lower_projections + self.adjoint_projections

    def add(self, *, lower: Cost, adjoint: Cost, upper: Cost, step: Cost) -> "Counts":
        """With one outer step's costs added."""
        parts: tuple[Any, ...] = (lower, adjoint, upper, step)
        totals: tuple[Any, ...] = (
            upper.projections,
            lower.projections,
            adjoint.projections,
            sum(part.upper_samples for part in parts),
            sum(part.lower_samples for part in parts),
        )
        spent = Counts(*(jnp.asarray(total, jnp.int32) for total in totals))
        return jax.tree.map(jnp.add, self, spent)
