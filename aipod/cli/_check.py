"""`aipod check`."""

import dataclasses
import inspect
import json
from typing import Any

import jax

from aipod.cli._show import out
from aipod.diagnose import check as examine
from aipod.experiments import SUMMARIES, load, taken
from aipod.experiments.base import Task
from aipod.experiments.config import refuse_unknown_options, resolve_options
from aipod.experiments.own import attempt, found_in, refuse_taken
from aipod.experiments.values import shown, suggestion, within
from aipod.problem import Bilevel
from aipod.runs._folder import finite


def check(target: str, options: dict[str, Any], *, seed: int, x64: bool, as_json: bool) -> int:
    within(seed, "--seed", 0)
    jax.config.update("jax_enable_x64", x64)
    if ":" in target:
        problem, x0, y0 = _imported(target, options)
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


def _imported(target: str, options: dict[str, Any]) -> tuple[Bilevel, Any, Any]:
    """Imports `module:name` or `file.py:name`; returns the problem, x0 and y0."""
    module, found = found_in(target)
    if callable(found) and not isinstance(found, Bilevel | Task):
        function, chosen = found, _options(target, found, options)
        found = attempt(target, lambda: function(**chosen))
    elif options:
        raise ValueError(f"{target} is no function: it takes no options.")
    if isinstance(found, Task):
        return found.problem, found.x0, found.y0
    if isinstance(found, Bilevel):
        missing = [start for start in ("x0", "y0") if not hasattr(module, start)]
        if missing:
            where, words = target.rpartition(":")[0], " and ".join(missing)
            raise ValueError(f"{where} must also define {words}, where to start.")
        return found, module.x0, module.y0
    if isinstance(found, tuple) and len(found) in (3, 4) and isinstance(found[0], Bilevel):
        return found[:3]
    raise ValueError(
        f"{target} must be an aipod.Bilevel, or a function that returns (problem, x0, y0), but it "
        f"is {type(found).__name__}."
    )


def _options(target: str, function: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a task of one's own; without options the function may be of any kind.

    A name that `aipod run` refuses is refused here too, also where the option is not given.
    """
    if not given:
        refuse_taken(target, _parameters(function), taken())
        return {}
    experiment = load(target)
    refuse_unknown_options(experiment, given)
    return resolve_options(experiment, given)


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # what is written in C may not say what it takes
        return []
