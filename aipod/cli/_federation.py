"""`aipod federation new`, `up`, `run` and `down`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from aipod._misc.extras import explain
from aipod.cli._show import err, out

if TYPE_CHECKING:
    from aipod.flower._federation import Federation


def up(folder: Path, *, nodes: int, tls: bool) -> None:
    federation = _federation(folder)
    federation.up(nodes, tls=tls, say=err.print)
    out.print(
        f"export FLWR_HOME={federation.home} FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1",
        soft_wrap=True,
        highlight=False,
    )
    app = folder.parent
    if (app / "pyproject.toml").is_file() and folder.name == "federation":
        err.print(f"ready: aipod federation run {app}")
    else:
        err.print("ready; with the line above in the shell: flwr run examples/flower --stream")


def new(app: Path) -> None:
    _federation(app)  # says what to install if Flower is missing
    from aipod.flower._new import write_app

    write_app(app)
    err.print(f"{app} holds an app that runs as it is; with your own task.py it is yours. Try it:")
    for line in (
        f"aipod federation up --tls --dir {app}/federation",
        f"aipod federation run {app}",
    ):
        out.print(line, soft_wrap=True, highlight=False)
    err.print(f"and in the end: aipod federation down --dir {app}/federation")


def run(app: Path, *, folder: Path | None, out_dir: Path | None) -> None:
    from aipod.runs._folder import RunFolder

    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    place = (out_dir or app / "runs" / now).absolute()
    _federation(folder or app / "federation").run(app, place)
    summary = RunFolder(place).read_summary()
    err.print(summary["message"])
    try:
        from aipod.cli._report import report

        report([place], None, force=False, as_json=False)
    except ImportError as error:
        # The run took its time, and is there.
        err.print(f"no report was written: {explain(error) or error}; then: aipod report {place}")
    out.print(f"The model is in {RunFolder(place).model}", soft_wrap=True, highlight=False)
    if summary["result"] != "completed":
        raise ValueError(f"the run ended as {summary['result']}: {summary['message']}")


def door(listen: str, link: str, certificate: Path, key: Path, authority: Path | None) -> None:
    _federation(Path())  # says what to install if Flower is missing
    from aipod.flower._door import serve

    trust = None if authority is None else str(authority)
    serve(listen, link, certificate=str(certificate), key=str(key), authority=trust)


def node(arguments: list[str]) -> None:
    _federation(Path())  # says what to install if Flower is missing
    from aipod.flower._warm import run_node

    run_node(arguments)


def down(folder: Path) -> None:
    ended = _federation(folder).down()
    err.print(f"ended {', '.join(ended)}" if ended else f"nothing was running from {folder}")


def _federation(folder: Path) -> Federation:
    try:
        from aipod.flower._federation import Federation
    except ImportError as error:
        raise ValueError(explain(error) or str(error)) from None
    return Federation(folder)
