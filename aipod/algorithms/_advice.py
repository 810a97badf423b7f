"""What a solver says about wrong slots, and about steps that were too long."""

from typing import Any

from aipod.slots.adjoint import AbstractAdjoint
from aipod.slots.lower import AbstractLower
from aipod.slots.upper import AbstractUpper
from aipod.stepsize import adapts, smaller


def check_slots(solver: Any) -> None:
    """Raises `ValueError` unless each of the three slots is one."""
    for name, kind in (
        ("lower", AbstractLower),
        ("adjoint", AbstractAdjoint),
        ("upper", AbstractUpper),
    ):
        if not isinstance(getattr(solver, name), kind):
            raise ValueError(
                f"{name} must be a slot made for it, got {type(getattr(solver, name)).__name__}."
            )


def smaller_steps(solver: Any) -> str:
    """What to change when a run diverged: the step sizes to try, by name."""
    lrs = {
        "lower_lr": solver.lower.lr,
        "adjoint_lr": solver.adjoint.lr,
        "upper_lr": solver.upper.lr,
    }
    tries = [advice for name, lr in lrs.items() if (advice := smaller(name, lr)) is not None]
    if not (adapts(solver.lower.lr) and adapts(solver.adjoint.lr)):
        tries.append("or lower_lr=aipod.Curvature(), which adapts by itself")
    return "Try smaller steps: " + ", ".join(tries) + "."
