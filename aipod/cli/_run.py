"""`aipod run`."""

import json
from typing import Any

from rich.markup import escape

from aipod.cli._opening import EXIT, opened
from aipod.cli._options import Request
from aipod.cli._show import err, out, run_table
from aipod.cli._watch import Watch
from aipod.experiments import load
from aipod.experiments.config import RunConfig, resolve
from aipod.experiments.execute import devices_for, execute, prepare
from aipod.runs._folder import RunFolder, finite


def run(request: Request) -> int:
    devices = None if request.mesh is None else devices_for(request.mesh)
    config, prepared, folder = opened(request, resolve, prepare, _name)
    with Watch() as watch:
        watch.begin(config.solver, config.steps)
        summary = execute(
            prepared,
            folder,
            resume=request.resume,
            front=watch,
            tensorboard=request.tensorboard,
            devices=devices,
        )
    if summary["last"]:
        _draw(folder)
    if request.as_json:
        print(json.dumps(finite(summary | {"folder": str(folder.path)})))
    else:
        out.print(run_table(summary))
    _last_words(summary, config, folder)
    return EXIT.get(summary["result"], 0)


def _name(config: RunConfig) -> str:
    return f"{load(config.experiment).folder or config.experiment}-{config.solver}"


def _draw(folder: RunFolder) -> None:
    from aipod._report.collect import collect
    from aipod._report.figures import run_figure

    run_figure(collect([folder.path])[0], folder.figures)


def _last_words(summary: dict[str, Any], config: RunConfig, folder: RunFolder) -> None:
    shown = escape(str(folder.path))
    if summary["result"] == "interrupted":
        err.print(
            f"interrupted after {summary['steps']:,} of {config.steps:,} steps; all of it is kept. "
            f"Go on with: aipod run --resume --out {shown}"
        )
    elif summary["result"] in ("diverged", "infeasible"):
        err.print(escape(f"aipod: {summary['message']}"))
    else:
        err.print(f"written to {shown}; next: aipod report {shown}")
