"""What a method was made for: the constraints it takes, and whether it takes noise."""

from typing import Any

import equinox as eqx

from aipod.problem._bilevel import Bilevel, Constant
from aipod.problem._samplers import FullBatch
from aipod.sets import AbstractSet, Free, Product


class Scope(eqx.Module):
    """The problems that a method accepts; a problem outside is refused, never bent to fit.

    **Arguments:**

    - `name`: the method, for the message.
    - `upper`, `lower`: whether x and y may be constrained.
    - `stochastic`: whether the objectives may be sampled.

    !!! example
        ```python
        solver = aipod.Alternating(lower, adjoint, upper, scope=aipod.Scope("mine", upper=False))
        ```
    """

    name: str = eqx.field(static=True)
    upper: bool = eqx.field(static=True, default=True)
    lower: bool = eqx.field(static=True, default=True)
    stochastic: bool = eqx.field(static=True, default=True)

    def check(self, problem: Bilevel) -> None:
        """Raises `ValueError` when the problem is outside."""
        for level, allowed in (("upper", self.upper), ("lower", self.lower)):
            constraint = getattr(problem, f"{level}_set")
            if not allowed and constrained(constraint):
                raise ValueError(
                    f"{self.name} takes no constraint on the {level} level, but {level}_set is "
                    f"{type(constraint).__name__}: use aipod.AiPOD, or leave {level}_set out."
                )
        if not self.stochastic and (random(problem.upper_samples) or random(problem.lower_samples)):
            raise ValueError(
                f"{self.name} is deterministic, but the problem draws samples: give it "
                "problem.expected(), or use aipod.AiPOD."
            )


def constrained(constraint: AbstractSet) -> bool:
    """Whether a set is less than the whole space."""
    if isinstance(constraint, Product):
        return any(constrained(part) for part in constraint.sets())
    return not isinstance(constraint, Free)


def random(samples: Any) -> bool:
    """Whether two draws may differ; a sampler that nothing is known about may."""
    return not (samples is None or isinstance(samples, FullBatch | Constant))
