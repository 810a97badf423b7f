"""Lets `ProxSkip(prob=None)`, the older spelling, make an `OneRound`; likewise for the adjoint."""

import inspect
from typing import Any, TypeVar

import equinox as eqx

Slot = TypeVar("Slot", bound=type)
_Meta: Any = type(eqx.Module)


class _OnceIsOneRound(_Meta):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(cls).bind_partial(*args, **kwargs).arguments
        if given.get("prob", 0) is None:
            if "once" not in vars(cls):
                raise ValueError(
                    f"{cls.__name__} is given prob=None, which stands for the slot that projects "
                    "once: derive it from aipod.OneRound or aipod.OneRoundAdjoint instead."
                )
            return cls.once(**{k: v for k, v in given.items() if k != "prob"})
        return super().__call__(*args, **kwargs)


def once_is_one_round(slot: Slot) -> Slot:
    """Makes a slot's class return `slot.once(...)` in place of an instance when `prob` is None."""
    # Set here, not in the class statement: type checkers do not follow a metaclass of Equinox's.
    slot.__class__ = _OnceIsOneRound
    return slot
