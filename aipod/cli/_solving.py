"""The options of run, compare and rates; the files of those names do the work."""

from typing import Annotated, Any

import typer

from aipod.cli import _options
from aipod.cli._options import Request, experiment_options, function_of, given_options

CODES = "Exit codes: 0 done, 2 bad input, 3 diverged, 130 interrupted (Ctrl-C); resume then."

_RUN = """Run one solver on an experiment, and keep everything about it in a folder.

The folder holds config.toml (which repeats the run), metrics.csv, summary.json, checkpoint/ and \
figures/. Options win over the file of --config, and --set wins over both. aipod run synthetic \
--help also shows the options of that experiment."""

_RUN_EXAMPLES = f"""Examples:

aipod run synthetic

aipod run synthetic --solver e-aipod --lower-prob 0.1 --steps 5000 --out runs/tenth

aipod run synthetic --set lower_prob=0.1 --set lower_lr=curvature --json

aipod run --config runs/tenth/config.toml --seed 1 --out runs/again

aipod run --resume --out runs/tenth

aipod run mine.py:task   (a function of your own; aipod new mine writes one)

{CODES}"""

_COMPARE = """Run several solvers with several seeds, and draw the paper's figure.

Each run has a folder of its own under runs/ in the comparison's folder. Lines are medians over \
the seeds, bands their range. Solver arguments given here hold for every solver that takes them. \
aipod compare synthetic --help also shows the options of that experiment. aipod compare table1 is \
the paper's Table 1: which constraints each method accepts, and the samples and projections that \
it then takes."""

_COMPARE_EXAMPLES = f"""Examples:

aipod compare synthetic

aipod compare synthetic --solvers aipod,e-aipod,e-aipod:lower_prob=0.1 --seeds 3

aipod compare synthetic --no-coupled --out runs/uncoupled

aipod compare table1

aipod compare mine.py:task --solvers aipod,e-aipod,e3-aipod --seeds 3

aipod compare --resume --out runs/uncoupled

{CODES}"""

_RATES = """Measure the paper's complexity claims: how samples and projections grow with accuracy.

Runs of K outer steps with the theorems' step sizes, for K over two and a half decades; log-log \
fits with 95 % intervals. Writes table.md, summary.json and figures."""

_RATES_EXAMPLES = """Examples:

aipod rates

aipod rates --problems synthetic --methods aipod,e-aipod --steps 10000 --seeds 4"""

_SOLVERS = (
    "Solvers, with commas between; arguments of one after colons. By default those of the paper's "
    "figure."
)


def add_verbs(app: typer.Typer, experiment: str | None) -> None:
    """Adds run, compare and rates, with the options of this experiment."""
    more = _options.solver_options() | experiment_options(experiment)
    options = {
        "solver": _options.Solver,
        **_shared("run", "Seed of everything random in the run."),
        "mesh": _options.whole(
            "Spread the work over so many devices: clients, or the examples of each batch."
        ),
    }
    app.command("run", help=_RUN, epilog=_RUN_EXAMPLES)(
        function_of(_run, {"experiment": _options.Experiment, **options, **more})
    )
    options = {
        "solvers": _options.text(_SOLVERS),
        "seeds": _options.whole("How many seeds for each. [dim](5)[/dim]"),
        **_shared("comparison", "The first of the seeds."),
    }
    app.command("compare", help=_COMPARE, epilog=_COMPARE_EXAMPLES)(
        function_of(_compare, {"experiment": _options.Experiment, **options, **more})
    )
    options = {
        "steps": _options.whole("The largest K."),
        "seeds": _options.whole("How many runs for each K."),
        "seed": _options.whole("Seed of everything random."),
        "problems": _options.text("synthetic, logistic or both, with commas between."),
        "methods": _options.text("Some of the methods, with commas between. All by default."),
        "out": _options.folder("The folder; a new one under runs/ by default."),
        "force": _options.Force,
        "as_json": _options.Json,
    }
    app.command("rates", help=_RATES, epilog=_RATES_EXAMPLES)(
        function_of(_rates, options, steps=100_000, seeds=16, seed=0)
    )


def _shared(what: str, seed: str) -> dict[str, Any]:
    """The options that `run` and `compare` have in common."""
    return {
        "steps": _options.whole("Outer steps to make in all."),
        "every": _options.whole("Record every so many outer steps."),
        "seed": _options.whole(seed),
        "x64": Annotated[
            bool | None, typer.Option("--x64/--no-x64", help="Compute in double precision.")
        ],
        "config": _options.Config,
        "set_": _options.Set,
        "out": _options.folder(f"The {what}'s folder; a new one under runs/ by default."),
        "resume": Annotated[
            bool, typer.Option("--resume", help=f"Go on with the {what} in --out.")
        ],
        "force": _options.Force,
        "as_json": _options.Json,
        "tensorboard": Annotated[
            bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard.")
        ],
    }


def _request(values: dict[str, Any]) -> Request:
    names = ("out", "resume", "force", "as_json", "tensorboard", "mesh")
    folder = {name: values.pop(name) for name in names if name in values}
    return Request(given_options(values), **folder)


def _run(values: dict[str, Any]) -> int:
    from aipod.cli import _run

    return _run.run(_request(values))


def _compare(values: dict[str, Any]) -> int:
    request = _request(values)
    if request.given.get("experiment") == "table1":
        from aipod.cli import _table1

        if request.tensorboard:
            raise ValueError("compare table1 writes no event files: leave --tensorboard out.")
        return _table1.table1(
            request.given,
            request.out,
            resume=request.resume,
            force=request.force,
            as_json=request.as_json,
        )
    from aipod.cli import _compare

    return _compare.compare(request)


def _rates(values: dict[str, Any]) -> int:
    from aipod.cli import _rates

    return _rates.rates(values.pop("out"), **values)
