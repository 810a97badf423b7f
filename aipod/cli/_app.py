"""Builds the command line, parses it and runs the chosen verb."""

import os
import re
from typing import Annotated, Any

import typer

import aipod
from aipod.cli import _looking, _solving
from aipod.cli._options import experiment_in
from aipod.experiments import load

# Typer exports only BadParameter; its base class covers every usage error.
_UsageError: Any = typer.BadParameter.__base__


def run(arguments: list[str]) -> int:
    """Runs the verb. A mistake in the line raises `ValueError`."""
    # During completion the shell passes the line in an environment variable.
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    experiment = experiment_in([*arguments, *typed.split()])
    app = _make(experiment)
    try:
        work = app(arguments, prog_name="aipod", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _UsageError as error:
        _refuse_unknown_experiment(arguments, experiment)
        raise ValueError(_explain(error)) from None
    # --help and --version have done their work and return an exit code.
    return work() if callable(work) else int(work or 0)


def _make(experiment: str | None) -> typer.Typer:
    """Returns the app, with the options of this experiment."""
    app = typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="Stochastic bilevel optimisation under linear equality constraints.",
        epilog=f"Begin with: aipod list\n\n{_solving.CODES}\n\n"
        "--debug, anywhere on the line, shows the traceback of an error.",
    )
    app.callback()(_root)
    _looking.add_list(app)
    _looking.add_new(app)
    _solving.add_verbs(app, experiment)
    _looking.add_verbs(app, experiment)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"aipod {aipod.__version__}")
        raise typer.Exit()


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def _refuse_unknown_experiment(arguments: list[str], experiment: str | None) -> None:
    """Raises `ValueError` for a misspelt experiment, whose options are then unknown too."""
    verb, name = [*arguments, "", ""][:2]
    wants = verb == "run" or (verb == "compare" and name != "table1")
    if experiment is None and wants and name and not name.startswith("-"):
        load(name)  # raises, and suggests a name or says what is wrong with the file


def _explain(error: Any) -> str:
    """Returns a usage error in one line, with the way to the help page."""
    option, near = (getattr(error, name, None) for name in ("option_name", "possibilities"))
    if option and near:  # the wording depends on the version of Typer
        message = f"there is no option {option}. Did you mean {', '.join(sorted(near))}?"
    else:
        message = " ".join(error.format_message().split())
        # Typer and click may both suggest the same command.
        message = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", message)
        message = message if message.endswith((".", "?")) else f"{message}."
    context = error.ctx
    return message if context is None else f"{message} See {context.command_path} --help."
