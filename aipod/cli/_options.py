"""Options that no function signature lists: those of the solvers and of the experiment named."""

import dataclasses
import itertools
import typing
from pathlib import Path
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperOption

from aipod.experiments import SUMMARIES, load
from aipod.experiments.solvers import ARGUMENTS

_GIVEN = "aipod.given"
_EXPERIMENT = "aipod.experiment"


class ExperimentCommand(TyperCommand):
    """A verb that also takes every solver argument and every option of its experiment."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_EXPERIMENT] = _experiment_in(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        more: list[click.Parameter] = []
        if self.name != "check":
            more += [_argument_option(name) for name in ARGUMENTS]
        if ctx.meta.get(_EXPERIMENT):
            more += _experiment_options(ctx.meta[_EXPERIMENT])
        return [*own, *more, help_option]


def given_options(
    context: typer.Context, config: Path | None, sets: list[str] | None, **own: Any
) -> dict[str, Any]:
    """Everything that was given: by the file, then by options, then by --set."""
    from aipod.experiments.config import assignments, read

    found = read(config) if config is not None else {}
    found |= {name: value for name, value in own.items() if value is not None}
    found |= context.meta.get(_GIVEN, {})
    return found | assignments(sets or [])


def _experiment_in(arguments: list[str]) -> str | None:
    """The experiment that a command line is about, as far as it can be seen before parsing."""
    named = next((argument for argument in arguments if argument in SUMMARIES), None)
    if named is not None:
        return named
    for argument, value in itertools.pairwise(arguments):
        path = {"--config": Path(value), "--out": Path(value) / "config.toml"}.get(argument)
        if path is not None and path.is_file():
            from aipod.experiments.config import read

            try:
                experiment = read(path).get("experiment")
            except ValueError:
                continue  # the verb itself will say what is wrong with the file
            if experiment in SUMMARIES:
                return str(experiment)
    return None


def _store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        context.meta.setdefault(_GIVEN, {})[parameter.name] = value


def _option(
    name: str, help: str, panel: str, *, flag: bool, metavar: str, on: bool = False
) -> TyperOption:
    dashed = "--" + name.replace("_", "-")
    return TyperOption(
        param_decls=[name, f"{dashed}/--no-{dashed[2:]}" if on else dashed],
        type=click.BOOL if flag else click.STRING,
        is_flag=flag or None,
        metavar=None if flag else metavar,
        help=help,
        callback=_store,
        expose_value=False,
        rich_help_panel=panel,
    )


def _argument_option(name: str) -> TyperOption:
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


def _experiment_options(experiment: str) -> list[click.Parameter]:
    from aipod.experiments.base import checks

    options = load(experiment).options
    kinds = {name: check.__name__ for name, check in checks(options).items()}
    metavars = {"whole": "INTEGER", "number": "NUMBER"}
    words = {
        name: "|".join(typing.get_args(hint))
        for name, hint in typing.get_type_hints(options).items()
        if typing.get_origin(hint) is typing.Literal
    }
    return [
        _option(
            field.name,
            f"{field.metadata['help']} [dim]({_shown(field.default)})[/dim]",
            f"Options of the experiment {experiment}",
            flag=kinds[field.name] == "flag",
            metavar=words.get(field.name) or metavars.get(kinds[field.name], "TEXT"),
            on=field.default is True,
        )
        for field in dataclasses.fields(options)
    ]


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
