"""Stochastic bilevel optimisation under linear equality constraints at both levels.

The public names stand in `aipod._public`. They are loaded when one of them is first used, so that
`aipod --help` and `aipod report` need not wait for JAX.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aipod._public import *  # noqa: F403


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__all__" or not name.startswith("__"):
            found = vars(import_module("aipod._public"))
            public = {key: value for key, value in found.items() if not key.startswith("_")}
            vars(self).update(public, __all__=sorted(public))
        if name not in vars(self):
            raise AttributeError(f"module 'aipod' has no attribute {name!r}")
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds every imported submodule here; `solve` and `hypergradient` are also functions
        # of the submodules of their names, and those are what the public names mean.
        if isinstance(value, ModuleType):
            own = getattr(value, name, None)
            value = own if getattr(own, "__module__", None) == value.__name__ else value
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(import_module("aipod._public"))})


sys.modules[__name__].__class__ = _Package
