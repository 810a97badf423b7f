"""The verbs and their options; what they do stands in the files beside this one."""

from pathlib import Path
from typing import Annotated, Any

import click
import typer

from aipod.cli._options import ExperimentCommand, given_options

_CODES = "Exit codes: 0 done, 2 bad input, 3 diverged, 130 interrupted (Ctrl-C); resume then."

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Stochastic bilevel optimisation under linear equality constraints.",
    epilog=f"Begin with: aipod list\n\n{_CODES}\n\n"
    "--debug, anywhere on the line, shows the traceback of an error.",
)

_Experiment = Annotated[
    str | None,
    typer.Argument(help="An experiment of `aipod list`; a configuration file may name it instead."),
]
_Steps = Annotated[int | None, typer.Option(help="Outer steps to make in all.")]
_Every = Annotated[int | None, typer.Option(help="Record every so many outer steps.")]
_X64 = Annotated[bool | None, typer.Option("--x64/--no-x64", help="Compute in double precision.")]
_Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file with any of these names.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Overrides everything else; repeatable."),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace what an earlier run wrote there.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard.")
]


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command("list")
def list_(as_json: _Json = False) -> None:
    """List the experiments and the solvers."""
    from aipod.cli import _list

    _list.show(as_json)


@app.command(
    "run",
    cls=ExperimentCommand,
    help="Run one solver on an experiment, and keep everything about it in a folder.\n\n"
    "The folder holds config.toml (which repeats the run), metrics.csv, summary.json, checkpoint/ "
    "and figures/. Options win over the file of --config, and --set wins over both. "
    "aipod run synthetic --help also shows the options of that experiment.",
    epilog="Examples:\n\n"
    "aipod run synthetic\n\n"
    "aipod run synthetic --solver e-aipod --lower-prob 0.1 --steps 5000 --out runs/tenth\n\n"
    "aipod run synthetic --set lower_prob=0.1 --set lower_lr=curvature --json\n\n"
    "aipod run --config runs/tenth/config.toml --seed 1 --out runs/again\n\n"
    f"aipod run --resume --out runs/tenth\n\n{_CODES}",
)
def run_(
    context: typer.Context,
    experiment: _Experiment = None,
    solver: Annotated[str | None, typer.Option(help="A solver of `aipod list`.")] = None,
    steps: _Steps = None,
    every: _Every = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random in the run.")] = None,
    x64: _X64 = None,
    config: _Config = None,
    set_: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    force: _Force = False,
    as_json: _Json = False,
    tensorboard: _Tensorboard = False,
) -> None:
    from aipod.cli import _run

    given = given_options(
        context,
        config,
        set_,
        experiment=experiment,
        solver=solver,
        steps=steps,
        every=every,
        seed=seed,
        x64=x64,
    )
    raise typer.Exit(
        _run.run(given, out, resume=resume, force=force, as_json=as_json, tensorboard=tensorboard)
    )


@app.command(
    "compare",
    cls=ExperimentCommand,
    help="Run several solvers with several seeds, and draw the paper's figure.\n\n"
    "Each run has a folder of its own under runs/ in the comparison's folder. Lines are medians "
    "over the seeds, bands their range. Solver arguments given here hold for every solver that "
    "takes them. aipod compare synthetic --help also shows the options of that experiment. "
    "aipod compare table1 is the paper's Table 1: which constraints each method accepts, and the "
    "samples and projections that it then takes.",
    epilog="Examples:\n\n"
    "aipod compare synthetic\n\n"
    "aipod compare synthetic --solvers aipod,e-aipod,e-aipod:lower_prob=0.1 --seeds 3\n\n"
    "aipod compare synthetic --no-coupled --out runs/uncoupled\n\n"
    "aipod compare table1\n\n"
    f"aipod compare --resume --out runs/uncoupled\n\n{_CODES}",
)
def compare_(
    context: typer.Context,
    experiment: _Experiment = None,
    solvers: Annotated[
        str | None,
        typer.Option(
            help="Solvers, with commas between; arguments of one after colons. "
            "By default those of the paper's figure."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds for each. [dim](5)[/dim]")
    ] = None,
    steps: _Steps = None,
    every: _Every = None,
    seed: Annotated[int | None, typer.Option(help="The first of the seeds.")] = None,
    x64: _X64 = None,
    config: _Config = None,
    set_: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The comparison's folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in --out.")
    ] = False,
    force: _Force = False,
    as_json: _Json = False,
    tensorboard: _Tensorboard = False,
) -> None:
    from aipod.cli import _compare

    given = given_options(
        context,
        config,
        set_,
        experiment=experiment,
        solvers=solvers,
        seeds=seeds,
        steps=steps,
        every=every,
        seed=seed,
        x64=x64,
    )
    if given.get("experiment") == "table1":
        from aipod.cli import _table1

        if tensorboard:
            raise ValueError("compare table1 writes no event files: leave --tensorboard out.")
        raise typer.Exit(_table1.table1(given, out, resume=resume, force=force, as_json=as_json))
    raise typer.Exit(
        _compare.compare(
            given, out, resume=resume, force=force, as_json=as_json, tensorboard=tensorboard
        )
    )


@app.command(
    "rates",
    help="Measure the paper's complexity claims: how samples and projections grow with accuracy."
    "\n\nRuns of K outer steps with the theorems' step sizes, for K over two and a half decades; "
    "log-log fits with 95 % intervals. Writes table.md, summary.json and figures.",
    epilog="Examples:\n\naipod rates\n\n"
    "aipod rates --problems synthetic --methods aipod,e-aipod --steps 10000 --seeds 4",
)
def rates_(
    steps: Annotated[int, typer.Option(help="The largest K.")] = 100_000,
    seeds: Annotated[int, typer.Option(help="How many runs for each K.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    problems: Annotated[
        str | None, typer.Option(help="synthetic, logistic or both, with commas between.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Some of the methods, with commas between. All by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder; a new one under runs/ by default.")
    ] = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    from aipod.cli import _rates

    raise typer.Exit(
        _rates.rates(
            out,
            steps=steps,
            seeds=seeds,
            seed=seed,
            problems=problems,
            methods=methods,
            force=force,
            as_json=as_json,
        )
    )


@app.command(
    "report",
    help="Write one self-contained HTML page with interactive charts about runs.\n\n"
    "The page opens from the file system, without a network.",
    epilog="Examples:\n\naipod report runs/tenth\n\naipod report runs --out everything.html",
)
def report_(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders of those.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; report.html in the folder by default.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace --out even if it is no report.")
    ] = False,
    as_json: _Json = False,
) -> None:
    from aipod.cli import _report

    _report.report(folders, out, force=force, as_json=as_json)


@app.command(
    "check",
    cls=ExperimentCommand,
    help="Examine a problem before a solver meets it: constraints, convexity, derivatives, steps."
    "\n\nmodule:name is a Bilevel beside x0 and y0 in the same module, or a function that returns "
    "(problem, x0, y0). Exit code 2 if something is wrong.",
    epilog="Examples:\n\naipod check synthetic\n\naipod check my_module:problem\n\n"
    "aipod check folder/my_file.py:make_problem",
)
def check_(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="An experiment, or module:name of a problem.")],
    seed: Annotated[int, typer.Option(help="Draws batches and directions.")] = 0,
    x64: Annotated[
        bool, typer.Option("--x64/--no-x64", help="In double precision, which sees more.")
    ] = True,
    set_: _Set = None,
    as_json: _Json = False,
) -> None:
    from aipod.cli import _check

    options: dict[str, Any] = given_options(context, None, set_)
    raise typer.Exit(_check.check(target, options, seed=seed, x64=x64, as_json=as_json))


_federation_app = typer.Typer(
    help="A federation on Flower, all of it on this machine, for trying out.",
    epilog="Examples:\n\naipod federation up --nodes 3 --tls\n\naipod federation down",
)
app.add_typer(_federation_app, name="federation")
_Dir = Annotated[
    Path, typer.Option("--dir", help="The folder with its logs, keys and client states.")
]


@_federation_app.command("up")
def federation_up(
    nodes: Annotated[int, typer.Option(help="How many SuperNodes, one for each client.")] = 3,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and let in registered keys alone.")
    ] = False,
    folder: _Dir = Path("federation"),
) -> None:
    """Start one SuperLink and some SuperNodes, and say how to run an app on them."""
    from aipod.cli import _federation

    _federation.up(folder, nodes=nodes, tls=tls)


@_federation_app.command("down")
def federation_down(folder: _Dir = Path("federation")) -> None:
    """End exactly the processes that `up` started."""
    from aipod.cli import _federation

    _federation.down(folder)


def run(arguments: list[str]) -> int:
    """Runs the verb; errors come out as exceptions."""
    code = typer.main.get_command(app).main(arguments, prog_name="aipod", standalone_mode=False)
    return int(code or 0)


def explain(error: click.ClickException) -> str:
    """A usage error in one line, with the way out."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if isinstance(error, click.NoSuchOption):
        names = [name for p in context.command.get_params(context) for name in p.opts[:1]]
        message += f" Options: {', '.join(n for n in names if n.startswith('--'))}."
    return f"{message} See {context.command_path} --help."
