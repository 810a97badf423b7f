"""Tasks from a user's own file, `mine.py:task`, as experiments of the command.

The function returns the problem, where to start and what to record. Its parameters become options:

    def task(size: int = 20, noise: Annotated[float, "noise of both levels"] = 0.1):
        ...
        return problem, x0, y0, record
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from aipod._misc.functions import keep
from aipod.experiments.base import Experiment, Metric, Panel, Task, option
from aipod.experiments.values import Plain, shown, suggestion
from aipod.problem import Bilevel
from aipod.solving import scalar_columns

# One machine; the comparison adds the simplest of the paper's solvers, and ours.
_SOLVERS = ("e-aipod", "aipod", "e3-aipod")
_PANEL = ("aipod", "e-aipod", "e3-aipod")
_LARGER = ("accuracy", "score", "reward")
_RETURNS = "return (problem, x0, y0, record), or an aipod.experiments.Task"


def found_in(target: str) -> tuple[types.ModuleType, Any]:
    """The module of `file.py:name` or `module:name`, and what the name stands for."""
    where, _, name = target.rpartition(":")
    module = _module(where)
    if not name:
        raise ValueError(f"name the function in {where} too, as in {where}:task.")
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{where} has no {name!r}.{suggestion(name, known)}")
    return module, getattr(module, name)


def own(target: str, taken: Mapping[str, Any]) -> Experiment:
    """The experiment that `file.py:function` describes.

    **Arguments:**

    - `target`: the file (or module) and the function.
    - `taken`: the names that its options may not have.
    """
    where, _, name = target.rpartition(":")
    try:
        _, function = found_in(target)
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and not where.endswith(".py"):
            raise ValueError(f"there is no experiment {shown(target)}: {error}") from error
        raise
    if not callable(function) or isinstance(function, Bilevel | Task):
        raise ValueError(
            f"{target} must be a function, so that the problem is made after the options are "
            f"known, but it is {type(function).__name__}: let it {_RETURNS}."
        )
    options = _options(target, function, taken)

    def build(chosen: Any) -> Task:
        values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
        return as_task(target, attempt(target, lambda: function(**values)))

    return Experiment(
        name=target,
        options=options,
        build=build,
        panels=lambda options: (Panel("", _PANEL),),
        metrics=(),
        axes=(),
        arguments={solver: {} for solver in _SOLVERS},
        steps=1000,
        every=10,
        about=_first_line(function),
        digest=_digest(where),
        folder=re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(where).stem}-{name}"),
    )


def refuse_taken(target: str, names: Iterable[str], taken: Mapping[str, Any]) -> None:
    """Raises `ValueError` where an option of a task has the name of one of the command."""
    for name in names:
        if name in taken:
            raise ValueError(
                f"{target}: rename the option {name}: the command has one of that name already."
            )


def as_task(target: str, made: Any) -> Task:
    """What the function returned, with the metrics and axes that reports need."""
    if isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], Bilevel):
        made = Task(*made)
    if not isinstance(made, Task):
        hint = ""
        if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], Bilevel):
            hint = " The record is missing, such as lambda x, y: {'loss': ...}."
        raise ValueError(f"{target} must {_RETURNS}, got {_kind(made)}.{hint}")
    if not callable(made.record):
        raise ValueError(f"{target}: record must be a function (x, y) -> {{name: value}}.")
    return dataclasses.replace(
        made, metrics=made.metrics or _metrics(target, made), axes=made.axes or _axes(made.problem)
    )


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _metrics(target: str, task: Task) -> tuple[Metric, ...]:
    """A metric for each scalar of the record, the first one first."""
    order: list[str] = []

    def recorded(x: Any, y: Any) -> Any:
        row = task.record(x, y)
        # JAX gives dictionaries back in the order of the alphabet.
        order.extend(row if isinstance(row, dict) else ())
        return row

    row = attempt(
        f"{target}: record",
        lambda: scalar_columns(jax.eval_shape(recorded, keep(task.x0), keep(task.y0))),
    )
    names = [name for name, value in row.items() if not value.shape]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    if not names:
        raise ValueError(f"{target}: let record(x, y) return a number, such as {{'loss': ...}}.")
    return tuple(
        Metric(
            name,
            name.replace("_", " "),
            log=None,
            better="larger" if any(word in name for word in _LARGER) else "smaller",
        )
        for name in names
    )


def _axes(problem: Bilevel) -> tuple[str, ...]:
    return ("projections", "step") if problem.clients is None else ("rounds", "step")


def _options(target: str, function: Callable[..., Any], taken: Mapping[str, Any]) -> type:
    """A dataclass with a field for each parameter of the function."""
    hints = attempt(target, lambda: typing.get_type_hints(function, include_extras=True))
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{target}: write each option out instead of *{name}.")
        if default is parameter.empty:
            raise ValueError(f"{target}: give the option {name} a default, as in {name}: int = 10.")
        refuse_taken(target, [name], taken)
        hint, words = _hint(hints.get(name, type(default)))
        if not _plain(hint):
            raise ValueError(
                f"{target}: the option {name} must be an int, float, bool, str or a Literal of "
                f"words, got {hint}."
            )
        fields.append((name, hint, option(default, words or f"of {function.__name__}")))
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def _hint(hint: Any) -> tuple[Any, str]:
    """The type of an option and its line of help, `Annotated[int, "how many"]`."""
    words = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        words = next((note for note in notes if isinstance(note, str)), "")
    return hint, words


def _plain(hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return len(inner) == 1 and _plain(inner[0])
    if typing.get_origin(hint) is Literal:
        return all(isinstance(word, str) for word in typing.get_args(hint))
    return hint in (int, float, bool, str)


def _first_line(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return text.partition("\n")[0].strip().rstrip(".")


def _digest(where: str) -> str:
    path = Path(where)
    if not where.endswith(".py"):
        spec = importlib.util.find_spec(where)
        path = Path(spec.origin or "") if spec is not None else path
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else ""


def _module(where: str) -> types.ModuleType:
    if not where:
        raise ValueError("name a module or a file, as in my_module:problem.")
    if not where.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # the current folder, as with `python -m`
        return attempt(where, lambda: importlib.import_module(where))
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"there is no file {where}: run this in the folder it is in.")
    # The digest in the name: the same file is imported once, and a changed one anew.
    name = f"{path.stem}_{_digest(where)[:8]}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{where} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # what the file imports from beside it
    load = spec.loader.exec_module
    try:
        attempt(where, lambda: load(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def attempt(what: str, function: Callable[[], Any]) -> Any:
    """Calls the function; any error in the user's file becomes a one-line ValueError."""
    try:
        return function()
    except ModuleNotFoundError as error:
        if what.partition(":")[0].endswith(".py"):
            raise ValueError(
                f"{what} imports {error.name!r}, which is not installed here: install it into the "
                "environment of this command."
            ) from error
        raise ValueError(
            f"there is no module {error.name!r}: run this in its folder, or give the path of a "
            "file, as in folder/my_file.py:problem."
        ) from error
    except (Exception, SystemExit) as error:
        words = f": {error}" if str(error) else "."
        raise ValueError(f"{what} raised {type(error).__name__}{words}") from error


def refuse_changed(experiment: Experiment, recorded: Plain | None) -> None:
    """Raises `ValueError` when the file is not the one that a configuration was written for."""
    if recorded is not None and recorded != experiment.digest:
        where = experiment.name.rpartition(":")[0]
        raise ValueError(
            f"{where} has changed since this configuration was written: bring the old file back, "
            "or start anew with another --out (a configuration file may leave task_digest out)."
        )
