"""Solvers that take the keywords of another one, written once."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from aipod.algorithms._alternating import Alternating

Solver = TypeVar("Solver", bound=Callable[..., Alternating])


def variant_of(
    base: Callable[..., Any], without: tuple[str, ...] = ()
) -> Callable[[Solver], Solver]:
    """Gives a function with `**arguments` the keywords of `base`, less `without`, besides its own.

    They are its signature for `help`, `inspect` and the command; others raise `TypeError`.
    """

    def decorate(function: Solver) -> Solver:
        own = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        keywords = {
            name: own.get(name, parameter)
            for name, parameter in inspect.signature(base).parameters.items()
            if name not in without
        }
        # The first keyword of a solver is that of x, and so is the last.
        found = own | keywords if "upper_lr" in own else keywords | own
        last = found.pop("upper_optimizer")
        parameters = [*found.values(), last]
        names = [parameter.name for parameter in parameters]

        @functools.wraps(function)
        def solver(**arguments: Any) -> Alternating:
            for name in arguments:
                if name not in names:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}: it "
                        f"takes {', '.join(names)}."
                    )
            return function(**arguments)

        signature = inspect.Signature(parameters, return_annotation=Alternating)
        described: Any = solver
        described.__signature__ = signature
        return described

    return decorate
