"""Options as Typer needs them, including those of the solvers and of the experiment."""

import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from aipod.experiments import SUMMARIES, load
from aipod.experiments.solvers import ARGUMENTS, SOLVERS

# Options that take a value, which may look like an experiment: `--out synthetic`.
_WITH_VALUE = {
    *("config", "every", "out", "seed", "seeds", "set", "solver", "solvers", "steps"),
    *(name for name, argument in ARGUMENTS.items() if argument.check.__name__ != "flag"),
}

Experiment = Annotated[
    str | None,
    typer.Argument(
        help="An experiment of `aipod list`, or mine.py:task, a function of your own; a "
        "configuration file may name it instead.",
        autocompletion=lambda: list(SUMMARIES),
        show_default=False,
    ),
]
Solver = Annotated[
    str | None,
    typer.Option(
        help="A solver of `aipod list`.", metavar="TEXT", autocompletion=lambda: list(SOLVERS)
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="A TOML file with any of these names."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Overrides everything else; repeatable."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what an earlier run wrote there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def whole(help: str) -> Any:
    """An optional whole number."""
    return Annotated[int | None, typer.Option(metavar="INTEGER", help=help)]


def text(help: str) -> Any:
    """An optional text."""
    return Annotated[str | None, typer.Option(metavar="TEXT", help=help)]


def folder(help: str) -> Any:
    """The option --out."""
    return Annotated[Path | None, typer.Option("--out", metavar="PATH", help=help)]


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `run` or `compare`: `given` describes the run, the rest is about output."""

    given: dict[str, Any]
    out: Path | None
    resume: bool
    force: bool
    as_json: bool
    tensorboard: bool
    mesh: int | None = None


# The work of a verb; returns the exit code. It runs after Typer has returned, because Typer handles
# Ctrl-C and closed pipes in its own way.
Work = Callable[[], int]


def function_of(
    answer: Callable[[dict[str, Any]], int], options: Mapping[str, Any], **defaults: Any
) -> Callable[..., Work]:
    """Returns a function for `typer.Typer.command` that has these options as its parameters.

    Typer only reads a function's signature, so the options can be chosen at run time. Options
    default to None, switches to False, unless `defaults` says otherwise.
    """
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=defaults.get(name, False if typing.get_args(kind)[0] is bool else None),
        )
        for name, kind in options.items()
    ]

    def verb(**values: Any) -> Work:
        return functools.partial(answer, values)

    made: Any = verb
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = dict(options)
    return verb


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """Merges what was given in the file, by options and by --set; later ones win."""
    from aipod.experiments.config import assignments, read

    rest = dict(values)
    config, sets = rest.pop("config", None), rest.pop("set_", None)
    found = read(config) if config is not None else {}
    found |= {name: value for name, value in rest.items() if value is not None}
    return found | assignments(sets or [])


def experiment_in(arguments: Sequence[str]) -> str | None:
    """Finds the experiment in a line that has not been parsed yet."""
    words = list(_words(arguments))
    # Elsewhere a colon belongs to a host and its port.
    own = words[:1] in (["run"], ["compare"], ["check"])
    if own and any(":" in word or word in ("--resume", "--config") for word in words):
        from aipod.cli._before import settle

        # `check` computes in double precision unless it is told not to.
        settle(["--x64", *words] if words[:1] == ["check"] else words)
    pairs = list(itertools.pairwise(["", *words]))
    for before, word in pairs:
        option = before.startswith("--") and before[2:].replace("-", "_") in _WITH_VALUE
        if not option and (word in SUMMARIES or (own and _loads(word))):
            return word
    for before, word in pairs:
        path = {"--config": Path(word), "--out": Path(word) / "config.toml"}.get(before)
        if path is not None and path.is_file():
            from aipod.experiments.config import read

            try:
                experiment = read(path).get("experiment")
            except (ValueError, OSError):
                continue  # the verb reports it later
            if isinstance(experiment, str) and (experiment in SUMMARIES or _loads(experiment)):
                return experiment
    return None


def _loads(word: str) -> bool:
    """Whether a word is a task in a file of one's own; if it is damaged, the verb says so later."""
    if ":" not in word or word.startswith("-"):
        return False
    try:
        load(word)
    except ValueError:
        return False
    return True


def _words(arguments: Sequence[str]) -> Iterator[str]:
    """Splits `--name=value` into two words."""
    for argument in arguments:
        if argument.startswith("--") and "=" in argument:
            yield from argument.split("=", 1)
        else:
            yield argument


def solver_options() -> dict[str, Any]:
    """One option for each argument of any solver."""
    return {name: _argument_option(name) for name in ARGUMENTS}


def experiment_options(experiment: str | None) -> dict[str, Any]:
    """One option for each option of the experiment."""
    if experiment is None:
        return {}
    from aipod.experiments.base import checks

    options = load(experiment).options
    kinds = {name: check.__name__ for name, check in checks(options).items()}
    metavars = {"whole": "INTEGER", "number": "NUMBER"}
    words = {
        name: "|".join(typing.get_args(hint))
        for name, hint in typing.get_type_hints(options).items()
        if typing.get_origin(hint) is typing.Literal
    }
    return {
        field.name: _option(
            field.name,
            f"{field.metadata['help']} [dim]({_shown(field.default)})[/dim]",
            f"Options of the experiment {experiment}",
            flag=kinds[field.name] == "flag",
            metavar=words.get(field.name) or metavars.get(kinds[field.name], "TEXT"),
            on=field.default is True,
        )
        for field in dataclasses.fields(options)
    }


def _argument_option(name: str) -> Any:
    argument = ARGUMENTS[name]
    kind = argument.check.__name__
    symbol = f" ({argument.symbol})" if argument.symbol else ""
    return _option(
        name,
        f"{argument.help}{symbol}",
        "Arguments of the solver, for those that take them",
        flag=kind == "flag",
        metavar={"whole": "INTEGER", "optimizer": "OPTIMISER"}.get(kind, "NUMBER"),
    )


def _option(name: str, help: str, panel: str, *, flag: bool, metavar: str, on: bool = False) -> Any:
    """A switch (with --no- if it is on by default), or a text that is checked later."""
    dashed = "--" + name.replace("_", "-")
    declared = typer.Option(
        f"{dashed}/--no-{dashed[2:]}" if on else dashed,
        metavar=None if flag else metavar,
        help=help,
        rich_help_panel=panel,
        show_default=False,
    )
    return Annotated[bool | None, declared] if flag else Annotated[str | None, declared]


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
