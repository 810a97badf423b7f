"""The options of list, new, report, check and federation; `_solving.py` has the other verbs."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from aipod.cli import _options
from aipod.cli._options import experiment_options, function_of, given_options

_REPORT = """Write one self-contained HTML page with interactive charts about runs.

The page opens from the file system, without a network."""

_REPORT_EXAMPLES = """Examples:

aipod report runs/tenth

aipod report runs --out everything.html"""

_CHECK = """Examine a problem before a solver meets it: constraints, convexity, derivatives, steps.

module:name is a Bilevel beside x0 and y0 in the same module, or a function that returns \
(problem, x0, y0). Exit code 2 if something is wrong."""

_CHECK_EXAMPLES = """Examples:

aipod check synthetic

aipod check my_module:problem

aipod check folder/my_file.py:make_problem"""

_TEMPLATE = """Write a commented task file that runs, to change into a problem of your own.

A function in it returns problem, x0, y0 and record; its parameters become options."""

_TEMPLATE_EXAMPLES = """Examples:

aipod new pricing

aipod run pricing.py:task --goods 8"""

_UP = "Start one SuperLink and some SuperNodes, and say how to run an app on them."
_NEW = "Write a complete app to begin with, and print the two commands that run it."
_RUN = "Run an app on a federation of this machine, wait for its end, and write the report."
_DOOR = """Let nodes reach a SuperLink of this machine, and let nobody else in.

It passes on what nodes ask for; apps are submitted and keys registered on this machine alone."""
_NODE = """Start a SuperNode whose app process stays alive between two messages.

All arguments are those of `flower-supernode`."""
_DOWN = "End exactly the processes that `up` started."

_Dir = Annotated[
    Path,
    typer.Option("--dir", metavar="PATH", help="The folder with its logs, keys and client states."),
]


def add_list(app: typer.Typer) -> None:
    app.command("list", help="List the experiments and the solvers.")(
        function_of(_list, {"as_json": _options.Json})
    )


def add_new(app: typer.Typer) -> None:
    options: dict[str, Any] = {
        "name": Annotated[Path, typer.Argument(help="The file, to be made; .py may be left out.")],
        "force": Annotated[bool, typer.Option("--force", help="Replace a file of that name.")],
    }
    app.command("new", help=_TEMPLATE, epilog=_TEMPLATE_EXAMPLES)(
        function_of(_template, options, name=inspect.Parameter.empty)
    )


def add_verbs(app: typer.Typer, experiment: str | None) -> None:
    """Adds report, check and federation; check gets the options of this experiment."""
    options: dict[str, Any] = {
        "folders": Annotated[
            list[Path], typer.Argument(help="Folders of runs, or folders of those.")
        ],
        "out": _options.folder("The page; report.html in the folder by default."),
        "force": Annotated[
            bool, typer.Option("--force", help="Replace --out even if it is no report.")
        ],
        "as_json": _options.Json,
    }
    app.command("report", help=_REPORT, epilog=_REPORT_EXAMPLES)(
        function_of(_report, options, folders=inspect.Parameter.empty)
    )
    options = {
        "target": Annotated[
            str, typer.Argument(help="An experiment, or module:name of a problem.")
        ],
        "seed": _options.whole("Draws batches and directions."),
        "x64": Annotated[
            bool, typer.Option("--x64/--no-x64", help="In double precision, which sees more.")
        ],
        "set_": _options.Set,
        "as_json": _options.Json,
        **experiment_options(experiment),
    }
    app.command("check", help=_CHECK, epilog=_CHECK_EXAMPLES)(
        function_of(_check, options, target=inspect.Parameter.empty, seed=0, x64=True)
    )
    federation = typer.Typer(
        help="A federation on Flower, all of it on this machine, for trying out.",
        epilog="Examples:\n\naipod federation new my-app\n\naipod federation up --nodes 3 --tls\n\n"
        "aipod federation run my-app\n\naipod federation down",
    )
    up = {
        "nodes": _options.whole("How many SuperNodes, one for each client."),
        "tls": Annotated[
            bool, typer.Option("--tls", help="Encrypt, and let in registered keys alone.")
        ],
        "folder": _Dir,
    }
    here = Path("federation")
    name = {"app": Annotated[Path, typer.Argument(help="The folder of the app, to be made.")]}
    federation.command("new", help=_NEW)(function_of(_new, name, app=inspect.Parameter.empty))
    run = {
        "app": Annotated[Path, typer.Argument(help="The folder of the app.")],
        "folder": Annotated[
            Path | None,
            typer.Option("--dir", metavar="PATH", help="The federation; in the app by default."),
        ],
        "out": _options.folder("The run folder; runs/ and the time in the app by default."),
    }
    federation.command("run", help=_RUN)(function_of(_run_app, run, app=inspect.Parameter.empty))
    federation.command("up", help=_UP)(function_of(_up, up, nodes=3, folder=here))
    federation.command("down", help=_DOWN)(function_of(_down, {"folder": _Dir}, folder=here))
    door = {
        "listen": _text("--listen", "HOST:PORT", "Where nodes come to, such as 0.0.0.0:9443."),
        "link": _text("--link", "HOST:PORT", "The SuperLink, on this machine: 127.0.0.1:8000."),
        "certificate": _path("--certificate", "The certificate that nodes see."),
        "key": _path("--key", "Its private key."),
        "authority": _path("--authority", "What the SuperLink's certificate is checked against."),
    }
    missing = inspect.Parameter.empty
    federation.command("door", help=_DOOR)(
        function_of(_door, door, listen=missing, link=missing, certificate=missing, key=missing)
    )
    any_words = {"ignore_unknown_options": True}
    words = {"arguments": Annotated[list[str], typer.Argument(help="Of flower-supernode.")]}
    federation.command("node", help=_NODE, context_settings=any_words)(
        function_of(_node, words, arguments=missing)
    )
    app.add_typer(federation, name="federation")


def _list(values: dict[str, Any]) -> int:
    from aipod.cli import _list

    _list.show(values["as_json"])
    return 0


def _template(values: dict[str, Any]) -> int:
    from aipod.cli import _new

    return _new.new(**values)


def _report(values: dict[str, Any]) -> int:
    from aipod.cli import _report

    _report.report(**values)
    return 0


def _check(values: dict[str, Any]) -> int:
    from aipod.cli import _check

    own = {name: values.pop(name) for name in ("target", "seed", "x64", "as_json")}
    return _check.check(options=given_options(values), **own)


def _text(name: str, metavar: str, help: str) -> Any:
    return Annotated[str, typer.Option(name, metavar=metavar, help=help)]


def _path(name: str, help: str) -> Any:
    return Annotated[Path, typer.Option(name, metavar="PATH", help=help)]


def _door(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.door(**values)
    return 0


def _node(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.node(**values)
    return 0


def _new(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.new(**values)
    return 0


def _run_app(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.run(values["app"], folder=values["folder"], out_dir=values["out"])
    return 0


def _up(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.up(**values)
    return 0


def _down(values: dict[str, Any]) -> int:
    from aipod.cli import _federation

    _federation.down(**values)
    return 0
