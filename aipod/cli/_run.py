"""`aipod run`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape

from aipod.cli._show import err, out, run_table
from aipod.cli._watch import Watch
from aipod.experiments.config import RunConfig, read, resolve
from aipod.experiments.execute import execute, prepare
from aipod.experiments.tensorboard import require_tensorboard
from aipod.runs._folder import RunFolder, finite

EXIT = {"interrupted": 130, "diverged": 3}


def run(
    given: dict[str, Any],
    path: Path | None,
    *,
    resume: bool,
    force: bool,
    as_json: bool,
    tensorboard: bool,
) -> int:
    if tensorboard:
        require_tensorboard()
    folder = RunFolder(path) if path is not None else None
    if resume:
        folder = to_resume(folder)
        given = merged(folder, given, resolve)
    config = resolve(given)
    prepared = prepare(config)
    if folder is None:
        folder = free_folder(f"{config.experiment}-{config.solver}")
    if resume:
        folder.write_config(config.toml())
    else:
        folder.create(config.toml(), force=force)
    with Watch() as watch:
        watch.begin(config.solver, config.steps)
        summary = execute(prepared, folder, resume=resume, front=watch, tensorboard=tensorboard)
    if summary["last"]:
        _draw(folder)
    if as_json:
        print(json.dumps(finite(summary | {"folder": str(folder.path)})))
    else:
        out.print(run_table(summary))
    _last_words(summary, config, folder)
    return EXIT.get(summary["result"], 0)


def _draw(folder: RunFolder) -> None:
    from aipod.report.collect import collect
    from aipod.report.figures import run_figure

    run_figure(collect([folder.path])[0], folder.figures)


def _last_words(summary: dict[str, Any], config: RunConfig, folder: RunFolder) -> None:
    shown = escape(str(folder.path))
    if summary["result"] == "interrupted":
        err.print(
            f"interrupted after {summary['steps']:,} of {config.steps:,} steps; all of it is kept. "
            f"Go on with: aipod run --resume --out {shown}"
        )
    elif summary["result"] == "diverged":
        err.print(escape(f"aipod: {summary['message']}"))
    else:
        err.print(f"written to {shown}; next: aipod report {shown}")


def to_resume(folder: RunFolder | None) -> RunFolder:
    """The folder, when there is a run in it to go on with."""
    if folder is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with.")
    if not folder.is_run():
        raise ValueError(f"{folder.path} holds no run to go on with: leave --resume out.")
    return folder


def merged(
    folder: RunFolder, given: dict[str, Any], resolve: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The folder's own configuration, with more steps or seeds if asked for, and nothing else."""
    own = read(folder.config)
    before, after = resolve(own).flat(), resolve(own | given).flat()
    for name in [name for name in {**before, **after} if name not in ("steps", "seeds")]:
        if before.get(name) != after.get(name):
            raise ValueError(
                f"--resume goes on with {folder.config}, where {name} is {before.get(name)}: leave "
                f"{name} out, or start anew with another --out."
            )
    return own | given


def free_folder(name: str) -> RunFolder:
    """The first free folder runs/name-001, -002, ..."""
    numbers = (Path("runs") / f"{name}-{number:03d}" for number in range(1, 10**6))
    return RunFolder(next(path for path in numbers if not path.exists()))
