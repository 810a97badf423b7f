"""What a step spends: the quantities that the paper's complexity bounds count."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from aipod.sets import AbstractSet


class Cost(eqx.Module):
    """What one slot spent in one outer step.

    - `projections`: on the slot's own set.
    - `upper_samples`, `lower_samples`: examples drawn from the two samplers.
    - `rounds`: communication rounds, in a federation.
    - `sent_x`, `sent_y`: vectors of the size of one client's x and y that each client sends, and
        gets back averaged, in those rounds.
    - `memory`: what the slot's oracles returned last, where derivatives are estimated.

    `turn.lower_cost` and `turn.upper_cost` fill it in from projections and draws.

    !!! example
        ```python
        cost = aipod.Cost(projections=5, lower_samples=5 * 64)
        ```
    """

    projections: Array | int = 0
    upper_samples: Array | int = 0
    lower_samples: Array | int = 0
    rounds: Array | int = 0
    sent_x: Array | int = 0
    sent_y: Array | int = 0
    memory: Any = None

    def with_samples(self, upper: Array | int, lower: Array | int) -> "Cost":
        """With more examples of the two levels."""
        return dataclasses.replace(
            self,
            upper_samples=self.upper_samples + upper,
            lower_samples=self.lower_samples + lower,
        )


def rounds_of(constraint: AbstractSet, projections: Array | int) -> Array | int:
    """How many of the projections are communication rounds: all in a federation, else none."""
    return projections if constraint.federated else 0


class Counts(eqx.Module):
    """Running totals inside the compiled loop, in 32 bits; `solve` keeps the sums in Python."""

    upper_projections: Array
    lower_projections: Array
    adjoint_projections: Array
    upper_samples: Array
    lower_samples: Array
    rounds: Array
    sent_x: Array
    sent_y: Array

    @staticmethod
    def zero() -> "Counts":
        return Counts(*(jnp.zeros((), jnp.int32) for _ in dataclasses.fields(Counts)))

    @property
    def projections(self) -> Array:
        return self.upper_projections + self.lower_projections + self.adjoint_projections

    def add(self, *, lower: Cost, adjoint: Cost, upper: Cost, step: Cost) -> "Counts":
        """With one outer step's costs added."""
        parts: tuple[Any, ...] = (lower, adjoint, upper, step)
        shared = ("upper_samples", "lower_samples", "rounds", "sent_x", "sent_y")
        totals: dict[str, Any] = {
            "upper_projections": upper.projections,
            "lower_projections": lower.projections,
            "adjoint_projections": adjoint.projections,
            **{name: sum(getattr(part, name) for part in parts) for name in shared},
        }
        spent = Counts(**{name: jnp.asarray(v, jnp.int32) for name, v in totals.items()})
        return jax.tree.map(jnp.add, self, spent)
