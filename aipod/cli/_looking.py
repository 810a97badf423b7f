"""The verbs that solve nothing: list, report and check, and those of a federation."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from aipod.cli import _options
from aipod.cli._options import Json, experiment_options, function_of, given_options

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

_Dir = Annotated[
    Path,
    typer.Option("--dir", metavar="PATH", help="The folder with its logs, keys and client states."),
]


def add_verbs(app: typer.Typer, experiment: str | None) -> None:
    """Adds the verbs but for `list`, with the options of this experiment where they are wanted."""
    app.command("report", help=_REPORT, epilog=_REPORT_EXAMPLES)(_report)
    options = {
        "target": Annotated[
            str, typer.Argument(help="An experiment, or module:name of a problem.")
        ],
        "seed": _options.whole("Draws batches and directions."),
        "x64": Annotated[
            bool, typer.Option("--x64/--no-x64", help="In double precision, which sees more.")
        ],
        "set_": _options.Set,
        "as_json": Json,
        **experiment_options(experiment),
    }
    app.command("check", help=_CHECK, epilog=_CHECK_EXAMPLES)(
        function_of(_check, options, target=inspect.Parameter.empty, seed=0, x64=True)
    )
    federation = typer.Typer(
        help="A federation on Flower, all of it on this machine, for trying out.",
        epilog="Examples:\n\naipod federation up --nodes 3 --tls\n\naipod federation down",
    )
    federation.command("up")(_federation_up)
    federation.command("down")(_federation_down)
    app.add_typer(federation, name="federation")


def list_(as_json: Json = False) -> None:
    """List the experiments and the solvers."""
    from aipod.cli import _list

    _list.show(as_json)


def _report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders of those.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The page; report.html in the folder by default."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace --out even if it is no report.")
    ] = False,
    as_json: Json = False,
) -> None:
    from aipod.cli import _report

    _report.report(folders, out, force=force, as_json=as_json)


def _check(values: dict[str, Any]) -> int:
    from aipod.cli import _check

    own = {name: values.pop(name) for name in ("target", "seed", "x64", "as_json")}
    return _check.check(options=given_options(values), **own)


def _federation_up(
    nodes: Annotated[
        int, typer.Option(metavar="INTEGER", help="How many SuperNodes, one for each client.")
    ] = 3,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and let in registered keys alone.")
    ] = False,
    folder: _Dir = Path("federation"),
) -> None:
    """Start one SuperLink and some SuperNodes, and say how to run an app on them."""
    from aipod.cli import _federation

    _federation.up(folder, nodes=nodes, tls=tls)


def _federation_down(folder: _Dir = Path("federation")) -> None:
    """End exactly the processes that `up` started."""
    from aipod.cli import _federation

    _federation.down(folder)
