"""What a method was made for: the constraints it takes, and whether it takes noise."""

import equinox as eqx

from aipod.problem._bilevel import Bilevel, is_noisy


class Scope(eqx.Module):
    """The problems that a method accepts; problems outside raise `ValueError`.

    **Arguments:**

    - `name`: the method, for the message.
    - `upper`, `lower`: whether x and y may be constrained.
    - `stochastic`: whether the objectives may be sampled.
    - `averages`: whether the only constraint may be that clients agree, by a server that averages.

    !!! example
        ```python
        solver = aipod.Alternating(lower, adjoint, upper, scope=aipod.Scope("mine", upper=False))
        ```
    """

    name: str = eqx.field(static=True)
    upper: bool = eqx.field(static=True, default=True)
    lower: bool = eqx.field(static=True, default=True)
    stochastic: bool = eqx.field(static=True, default=True)
    averages: bool = eqx.field(static=True, default=False)

    def check(self, problem: Bilevel) -> None:
        """Raises `ValueError` when the problem is outside."""
        for level, allowed in (("upper", self.upper), ("lower", self.lower)):
            constraint = getattr(problem, f"{level}_set")
            if not allowed and constraint.constrained:
                raise ValueError(
                    f"{self.name} takes no constraint on the {level} level, but {level}_set is "
                    f"{type(constraint).__name__}: use aipod.AiPOD, or leave {level}_set out."
                )
            averaged = constraint.together and not constraint.apart
            if self.averages and constraint.constrained and not averaged:
                raise ValueError(
                    f"{self.name} takes no constraint but the agreement of clients with a server, "
                    f"but {level}_set is {type(constraint).__name__}: use aipod.AiPOD or "
                    f"aipod.E3AiPOD, or leave {level}_set out."
                )
        if is_noisy(problem) and not self.stochastic:
            raise ValueError(
                f"{self.name} is deterministic, but the problem draws samples: give it "
                "problem.expected(), or use aipod.AiPOD."
            )
