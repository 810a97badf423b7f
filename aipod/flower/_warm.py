"""A node's app process that stays, in place of one for every message.

A SuperNode starts the command `flwr-clientapp` for every message, by name, and does not wait for
it. On a warm node another command of that name comes first in PATH. It hands its arguments to a
worker over a socket in a private folder; the worker has JAX, the data and the compiled programs in
memory, and runs what Flower's own command runs. The first message starts the worker. Where that
cannot be, Flower's own command runs, as on any other node.

A worker serves one app: one with other code is refused, and is served by a new worker from its next
message on. It ends with the run, with its SuperNode, or when nothing has come for a while.
"""

import contextlib
import fcntl
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aipod._misc.files import write_text
from aipod.flower._client import run_ended
from aipod.flower._process import beside_python

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_SECONDS_IDLE = 900.0
_TAKEN, _BUSY, _DONE = b"t", b"b", b"d"
_SHIM = """import os, socket, sys, json
place, python, real = {place!r}, {python!r}, {real!r}
first = last = b""
try:
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(place + "/socket")
        way.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
        first = way.recv(1)
        last = way.recv(1) if first == b"t" else b""
    if first == b"t":
        sys.exit(last != b"d")
except OSError:
    if first == b"t":
        sys.exit(1)
    start = "from aipod.flower._warm import main; main()"
    os.execv(python, [python, "-c", start, place, real, *sys.argv[1:]])
os.execv(real, [real, *sys.argv[1:]])
"""


def warm_environment(environment: Mapping[str, str], name: str = "") -> dict[str, str]:
    """The environment in which a SuperNode's app process stays alive.

    `name`: of the folder that is made for it among the system's temporary ones.
    """
    # In a short place: the name of a socket has at most 100 characters.
    place = tempfile.mkdtemp(prefix=f"aipod-{name}")
    write_command(Path(place), Path(sys.executable).parent / "flwr-clientapp")
    path = os.pathsep.join([place, environment.get("PATH", "")])
    # How often Flower looks for the next message; by default every second.
    return {**environment, "PATH": path, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


def write_command(place: Path, real: Path) -> Path:
    """Writes the command that stands for Flower's own, `real`, into a folder."""
    python, shim = sys.executable, place / "shim.py"
    code = _SHIM.format(place=str(place), python=python, real=str(real))
    write_text(shim, code, private=True)
    line = f'exec {shlex.quote(python)} -IS {shlex.quote(str(shim))} "$@"'
    write_text(place / "flwr-clientapp", f"#!/bin/sh\n{line}\n", private=True)
    (place / "flwr-clientapp").chmod(0o700)
    return place / "flwr-clientapp"


def run_node(arguments: Sequence[str]) -> None:
    """Becomes a SuperNode whose app process stays; the arguments are those of the SuperNode."""
    command = beside_python("flower-supernode")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.execve(command, [command, *arguments], warm_environment(os.environ | {"PATH": path}))


def main() -> None:
    """Becomes the worker of a place, and begins with the message of these arguments."""
    place, real, *arguments = sys.argv[1:]
    with open(os.path.join(place, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry = AppEntry()
        except (OSError, ImportError, AttributeError):
            # Another one has just begun, or this Flower is built differently.
            os.execv(real, [real, *arguments])
        parent = _after("--parent-pid", arguments)
        worker = Worker(Path(place), entry)
        threading.Thread(target=worker.watch, args=(parent,), daemon=True).start()
        worker.serve(arguments)


def _after(name: str, arguments: list[str]) -> int | None:
    return int(arguments[arguments.index(name) + 1]) if name in arguments else None


class Worker:
    """Takes messages one at a time; a second one at once is left to Flower's own command."""

    def __init__(self, place: Path, entry: Callable[[list[str]], bool]) -> None:
        """`entry`: runs the command with its arguments; whether the worker can go on."""
        self._place, self._entry = place, entry
        self._waiting: queue.Queue[tuple[list[str], socket.socket]] = queue.Queue()
        self._free = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = str(place / "socket")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address)
        self._listener.bind(self._address)
        self._listener.listen(8)

    def serve(self, arguments: list[str], seconds: float = _SECONDS_IDLE) -> None:
        """Handles one message, and those that come, until it is time to end."""
        self._free.acquire()
        threading.Thread(target=self._take, daemon=True).start()
        going = self._entry(arguments)
        while going:
            self._free.release()
            try:
                arguments, way = self._waiting.get(timeout=seconds)
            except queue.Empty:
                if self._free.acquire(blocking=False):
                    break
                arguments, way = self._waiting.get()
            going = self._entry(arguments)
            with way, contextlib.suppress(OSError):
                way.sendall(_DONE)
        # Nobody is taken any more: whoever comes runs Flower's own command, or a new worker.
        with contextlib.suppress(OSError):
            os.unlink(self._address)
        self._listener.close()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                way, _ = self._listener.accept()
                with contextlib.suppress(OSError, ValueError):
                    way.settimeout(5.0)
                    with way.makefile("rb") as lines:
                        arguments = json.loads(lines.readline(1 << 16))
                    if not self._free.acquire(blocking=False):
                        way.sendall(_BUSY)
                        way.close()
                        continue
                    way.sendall(_TAKEN)
                    self._waiting.put((arguments, way))
                    continue
                way.close()

    def watch(self, parent: int | None) -> None:
        """Ends with the process that messages come from; what matters is on disk at any time."""
        while parent is not None:
            time.sleep(0.5)
            try:
                os.kill(parent, 0)
            except OSError:
                shutil.rmtree(self._place, ignore_errors=True)
                os._exit(0)


class _Ended(SystemExit):
    """The end of one message."""


class AppEntry:
    """Flower's command `flwr-clientapp` within this process, any number of times."""

    def __init__(self) -> None:
        """Raises `ImportError` or `AttributeError` where Flower is not built as it was."""
        from flwr.clientapp.client_app import LoadClientAppError
        from flwr.supercore.exit.exit_handler import trigger_exit_handlers
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
        from flwr.supernode.runtime import run_clientapp as runtime

        self._command, self._refusal = flwr_clientapp, LoadClientAppError
        self._app: tuple[Any, ...] | None = None
        self._other = False
        load = runtime.get_load_client_app_fn

        def ended(code: int, *_: Any, **__: Any) -> NoReturn:
            # What Flower does at the end of the process, but for ending it.
            for before in (True, False):
                trigger_exit_handlers(run_before_force_exit=before)
            raise _Ended(code)

        def loader(*arguments: Any, **options: Any) -> Callable[..., Any]:
            found = load(*arguments, **options)

            def checked(*app: Any) -> Any:
                self._app = self._app or app
                if app != self._app:
                    # Its modules have the names of those that are loaded.
                    self._other = True
                    raise LoadClientAppError("this process serves another app: ask again.")
                return found(*app)

            return checked

        changed: Any = runtime
        changed.flwr_exit, changed.get_load_client_app_fn = ended, loader

    def __call__(self, arguments: list[str]) -> bool:
        """Handles one message; whether this process can handle others."""
        arguments = list(arguments)
        if "--parent-pid" in arguments:
            # The worker looks after it, once for all messages.
            place = arguments.index("--parent-pid")
            del arguments[place : place + 2]
        handlers = [signal.getsignal(kind) for kind in _SIGNALS]
        sys.argv = ["flwr-clientapp", *arguments]
        with contextlib.suppress(_Ended):
            self._command()
        for kind, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(kind, handler)
        return not (self._other or run_ended.is_set())
