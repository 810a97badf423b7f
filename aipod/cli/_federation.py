"""`aipod federation up` and `down`."""

from __future__ import annotations

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
    err.print("ready; with the line above in the shell: flwr run examples/flower --stream")


def down(folder: Path) -> None:
    ended = _federation(folder).down()
    err.print(f"ended {', '.join(ended)}" if ended else f"nothing was running from {folder}")


def _federation(folder: Path) -> Federation:
    try:
        from aipod.flower._federation import Federation
    except ImportError as error:
        raise ValueError(explain(error) or str(error)) from None
    return Federation(folder)
