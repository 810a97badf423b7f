"""What `run` and `compare` do first: resolve the configuration and open the folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aipod.cli._options import Request
from aipod.experiments.config import read
from aipod.experiments.tensorboard import require_tensorboard
from aipod.runs._folder import RunFolder

EXIT = {"interrupted": 130, "diverged": 3, "infeasible": 3}


class Config(Protocol):
    """The methods that RunConfig and CompareConfig share."""

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
    """Returns the configuration, what was prepared from it, and the folder with its config.toml.

    Nothing is written until the whole line has been checked.

    **Arguments:**

    - `resolve`: makes the configuration from the given names.
    - `prepare`: builds what is to be run.
    - `name`: the name of a new folder under runs/.
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
    """Returns the folder if it holds a run to continue, and raises ValueError otherwise."""
    if folder is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with.")
    if not folder.is_run():
        raise ValueError(f"{folder.path} holds no run to go on with: leave --resume out.")
    return folder


def _merged(
    folder: RunFolder, given: dict[str, Any], resolve: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Returns the folder's configuration; only `steps` and `seeds` may be changed."""
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
    """Returns the first free folder runs/name-001, -002, ..."""
    numbers = (Path("runs") / f"{name}-{number:03d}" for number in range(1, 10**6))
    return RunFolder(next(path for path in numbers if not path.exists()))
