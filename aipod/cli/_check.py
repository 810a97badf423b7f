"""`aipod check`."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from aipod.cli._show import out
from aipod.diagnose import check as examine
from aipod.experiments import SUMMARIES, load
from aipod.experiments.base import Task
from aipod.experiments.config import refuse_unknown_options, resolve_options
from aipod.experiments.values import shown, suggestion, within
from aipod.problem import Bilevel
from aipod.runs._folder import finite


def check(target: str, options: dict[str, Any], *, seed: int, x64: bool, as_json: bool) -> int:
    within(seed, "--seed", 0)
    jax.config.update("jax_enable_x64", x64)
    if ":" in target:
        if options:
            raise ValueError(f"{target} is no experiment: it takes no options.")
        problem, x0, y0 = _imported(target)
    elif target in SUMMARIES:
        experiment = load(target)
        refuse_unknown_options(experiment, options)
        task = experiment.build(experiment.options(**resolve_options(experiment, options)))
        problem, x0, y0 = task.problem, task.x0, task.y0
    else:
        raise ValueError(
            f"there is no experiment {shown(target)}.{suggestion(target, SUMMARIES)} Name one of "
            f"{', '.join(SUMMARIES)}, or a problem of your own as module:name."
        )
    report = examine(problem, x0, y0, key=jax.random.key(seed))
    if as_json:
        print(json.dumps(finite({"ok": report.ok, **dataclasses.asdict(report)})))
    else:
        out.print(str(report), markup=False)
    return 0 if report.ok else 2


def _imported(target: str) -> tuple[Bilevel, Any, Any]:
    """Imports `module:name` or `file.py:name`; returns the problem, x0 and y0."""
    where, _, name = target.rpartition(":")
    module = _module(where)
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{where} has no {name!r}.{suggestion(name, known)}")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, Bilevel | Task):
        found = _attempt(target, found)
    if isinstance(found, Task):
        return found.problem, found.x0, found.y0
    if isinstance(found, Bilevel):
        missing = [start for start in ("x0", "y0") if not hasattr(module, start)]
        if missing:
            raise ValueError(f"{where} must also define {' and '.join(missing)}, where to start.")
        return found, module.x0, module.y0
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], Bilevel):
        return found
    raise ValueError(
        f"{target} must be an aipod.Bilevel, or a function that returns (problem, x0, y0), but it "
        f"is {type(found).__name__}."
    )


def _module(where: str) -> ModuleType:
    if not where:
        raise ValueError("name a module, as in my_module:problem.")
    if not where.endswith(".py"):
        sys.path.insert(0, "")  # the current folder, as with `python -m`
        return _attempt(where, lambda: importlib.import_module(where))
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"there is no file {where}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{where} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    load = spec.loader.exec_module
    _attempt(where, lambda: load(module))
    return module


def _attempt(what: str, function: Callable[[], Any]) -> Any:
    """Calls the function; any error in the user's file becomes a one-line ValueError."""
    try:
        return function()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"there is no module {error.name!r}: run this in its folder, or give the path of a "
            "file, as in folder/my_file.py:problem."
        ) from error
    except (Exception, SystemExit) as error:
        words = f": {error}" if str(error) else "."
        raise ValueError(f"{what} raised {type(error).__name__}{words}") from error
