"""How `run` and `compare` begin: what is to be run, and the folder that it is written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aipod.cli._options import Request
from aipod.experiments.config import read
from aipod.experiments.tensorboard import require_tensorboard
from aipod.runs._folder import RunFolder

EXIT = {"interrupted": 130, "diverged": 3}


class Config(Protocol):
    """What the configurations of runs and comparisons have in common."""

    def toml(self) -> str: ...

    def flat(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Config)
P = TypeVar("P")


def opened(
    request: Request,
    resolve: Callable[[dict[str, Any]], C],
    prepare: Callable[[C], P],
    name: Callable[[C], str],
) -> tuple[C, P, RunFolder]:
    """The configuration, what was prepared from it, and the folder, with its config.toml written.

    Nothing is written before all that can be wrong with the line has been found.

    **Arguments:**

    - `resolve`: from the names given to a configuration.
    - `prepare`: builds what is to be run.
    - `name`: what a new folder under runs/ is called.
    """
    if request.resume and request.force:
        raise ValueError("--resume goes on with a run and --force replaces it: choose one of them.")
    if request.tensorboard:
        require_tensorboard()
    given, folder = request.given, RunFolder(request.out) if request.out is not None else None
    if request.resume:
        folder = _to_resume(folder)
        given = _merged(folder, given, resolve)
    config = resolve(given)
    prepared = prepare(config)
    if folder is None:
        folder = free_folder(name(config))
    if request.resume:
        folder.write_config(config.toml())
    else:
        folder.create(config.toml(), force=request.force)
    return config, prepared, folder


def _to_resume(folder: RunFolder | None) -> RunFolder:
    """The folder, when there is a run in it to go on with."""
    if folder is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with.")
    if not folder.is_run():
        raise ValueError(f"{folder.path} holds no run to go on with: leave --resume out.")
    return folder


def _merged(
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
