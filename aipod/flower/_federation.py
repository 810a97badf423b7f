"""A federation on this machine for trying out: one SuperLink and some SuperNodes."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from aipod._misc.files import append_private, narrow, private_folder, write_text
from aipod.flower._keys import make_certificates, make_node_key
from aipod.flower._process import Process, began, beside_python, marked
from aipod.flower._warm import warm_environment

_RECORD = "federation.json"
# An environment variable of every process of a federation; what those start inherits it.
_MARK = "AIPOD_FEDERATION"
_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 15.0
CONNECTION = "aipod-local"


class Federation:
    """The processes of a federation, and the folder with their files.

    - `link.log`, `node-0.log`, ...: what the processes print.
    - `flwr/`: Flower's own home, with the connection for `flwr run`; set `FLWR_HOME` to it.
    - `certificates/`, `keys/`: with TLS; they are for this machine and last a month.
    - `states/`: the clients' states; `link.db`: the SuperLink's database.

    All of it is readable for its owner alone.
    """

    def __init__(self, folder: Path, *, warm: bool = True) -> None:
        """`warm`: whether the nodes' app processes stay between two messages."""
        self.folder, self._warm = folder.absolute(), warm
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def home(self) -> Path:
        return self.folder / "flwr"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command about this federation, with telemetry off."""
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        # Flower starts its own programs by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return os.environ | quiet | {"FLWR_HOME": str(self.home), "PATH": path}

    def up(self, nodes: int, *, tls: bool, say: Callable[[str], None] = lambda line: None) -> None:
        """Starts the federation, and returns when it is ready for `flwr run`."""
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}.")
        if any(map(self._pids, self.processes())):
            raise ValueError(
                f"a federation is running from {self.folder}: end it with `aipod federation down`, "
                "or choose another folder with --dir."
            )
        if not self.folder.exists():
            private_folder(self.folder)
        (self.folder / _RECORD).unlink(missing_ok=True)
        port, door = _free_port(), _free_port()
        self._note(
            port=port, door=door, tls=tls, nodes=nodes, mark=secrets.token_hex(8), processes=[]
        )
        try:
            if tls:
                make_certificates(self.folder / "certificates")
            self.start_link()
            if tls:
                self.start_door()
            say(f"SuperLink on 127.0.0.1:{port}" + (", TLS" if tls else ", without encryption"))
            for index in range(nodes):
                if tls:
                    _, public = make_node_key(self.folder / "keys", f"node-{index}")
                    self._flwr("supernode", "register", str(public), CONNECTION)
                self.start_node(index)
                say(f"SuperNode {index} of {nodes}" + (", its key registered" if tls else ""))
        except BaseException:
            self.down()
            raise

    def run(self, app: Path, place: Path) -> None:
        """Runs an app to its end, with `place` as its run folder; what it logs is shown."""
        if not any(map(self._pids, self.processes())):
            raise ValueError(
                f"no federation is running from {self.folder}: start one with `aipod federation up "
                f"--dir {self.folder}`."
            )
        config = f"run-dir={json.dumps(str(place))}"
        command = [beside_python("flwr"), "run", str(app), CONNECTION, "--stream"]
        done = subprocess.run([*command, "--run-config", config], env=self.environment, check=False)
        if done.returncode or not (place / "summary.json").is_file():
            raise ValueError(f"the run did not begin: read {self.folder / 'link.log'}.")

    def down(self) -> list[str]:
        """Ends exactly the processes that `up` started and those they started; returns names."""
        names = [process.name for process in self.processes() if self._pids(process)]
        for kind in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                self.send(process.name, kind)
            deadline = time.monotonic() + _SECONDS_TO_END
            while any(map(self._pids, self.processes())) and time.monotonic() < deadline:
                time.sleep(0.1)
        for child in self._children:
            child.wait()
        for place in Path(tempfile.gettempdir()).glob(f"aipod-{self._noted().get('mark')}-*"):
            shutil.rmtree(place, ignore_errors=True)
        (self.folder / _RECORD).unlink(missing_ok=True)
        return names

    def send(self, name: str, kind: signal.Signals) -> None:
        """Sends a signal to one of the processes and to all that it has started."""
        for process in self.processes():
            for pid in self._pids(process) if process.name == name else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, kind)

    def _pids(self, process: Process) -> list[int]:
        """The process itself, if it still runs, and those it started.

        Flower puts some of its processes into sessions of their own. They are found by the mark
        in their environment, which they inherit.
        """
        mark = f"{_MARK}={self._noted()['mark']}/{process.name}".encode()
        return sorted({*([process.pid] if process.alive else []), *marked(mark)})

    def processes(self) -> list[Process]:
        return [Process(**one) for one in self._noted().get("processes", [])]

    def start_link(self) -> Process:
        """Starts the SuperLink, or starts it again with the same port and database."""
        noted = self._noted()
        port, tls = noted["port"], noted["tls"]
        certificates = self.folder / "certificates"
        security = ["--insecure"]
        if tls:
            security = [
                *("--ssl-certfile", str(certificates / "server.crt")),
                *("--ssl-keyfile", str(certificates / "server.key")),
                *("--ssl-ca-certfile", str(certificates / "ca.crt")),
                "--enable-supernode-auth",
            ]
        private_folder(self.home)
        for path in self.folder.glob("link.db*"):
            narrow(path)
        trust = f'root-certificates = "{certificates / "ca.crt"}"' if tls else "insecure = true"
        write_text(
            self.home / "config.toml",
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\n{trust}\n',
            private=True,
        )
        process = self._start(
            "link",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--database", str(self.folder / "link.db")),
            "--disable-runtime-dependency-installation",
            *security,
        )
        self._wait_for_health(process, port, tls)
        return process

    def start_door(self) -> Process:
        """Starts the door through which nodes come: it leads to their part of the SuperLink."""
        noted, certificates = self._noted(), self.folder / "certificates"
        process = self._start(
            "door",
            "aipod",
            *("federation", "door", "--listen", f"127.0.0.1:{noted['door']}"),
            *("--link", f"127.0.0.1:{noted['port']}"),
            *("--certificate", str(certificates / "server.crt")),
            *("--key", str(certificates / "server.key")),
            *("--authority", str(certificates / "ca.crt")),
        )
        self._wait_for_health(process, noted["door"], tls=True)
        return process

    def start_node(self, index: int, key: Path | None = None) -> Process:
        """Starts one SuperNode, or starts it again; `key` is a private key in place of its own."""
        noted = self._noted()
        security = ["--insecure"]
        if noted["tls"]:
            key = key or self.folder / "keys" / f"node-{index}"
            narrow(key)
            security = [
                *("--root-certificates", str(self.folder / "certificates" / "ca.crt")),
                "--auth-supernode-private-key",
                str(key),
            ]
        node = (
            f"partition-id={index} num-partitions={noted['nodes']} "
            f'state-dir="{self.folder / "states"}"'
        )
        around = self.environment
        if self._warm:
            around = warm_environment(around, f"{noted['mark']}-")
        return self._start(
            f"node-{index}",
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{noted.get('door') if noted['tls'] else noted['port']}"),
            *("--port", str(_free_port()), "--node-config", node),
            *security,
            around=around,
        )

    def _start(
        self, name: str, command: str, *arguments: str, around: Mapping[str, str] | None = None
    ) -> Process:
        with append_private(self.folder / f"{name}.log") as output:
            child = subprocess.Popen(
                [beside_python(command), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**(around or self.environment), _MARK: f"{self._noted()['mark']}/{name}"},
                cwd=self.folder,
                # So that Ctrl-C in the shell does not end it.
                start_new_session=True,
                # Databases and states are for their owner alone.
                umask=0o077,
            )
        self._children.append(child)
        process = Process(name, child.pid, began(child.pid) or "")
        noted = self._noted()
        others = [one for one in noted["processes"] if one["name"] != name]
        self._note(**(noted | {"processes": [*others, dataclasses.asdict(process)]}))
        return process

    def _wait_for_health(self, process: Process, port: int, tls: bool) -> None:
        trust = None
        if tls:
            trust = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.crt"))
        url = f"http{'s' if tls else ''}://127.0.0.1:{port}/health"
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline and process.alive:
            try:
                with urllib.request.urlopen(url, timeout=2, context=trust) as reply:
                    if reply.status == 200:
                        return
            except urllib.error.HTTPError:
                return  # the door answers, and says that this is not for nodes
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        log = self.folder / f"{process.name}.log"
        raise ValueError(f"the process {process.name} did not become ready: read {log}.")

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [beside_python("flwr"), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())
            raise ValueError(f"`flwr {' '.join(arguments[:2])}` failed: {said}")
        return done.stdout

    def _noted(self) -> dict:
        try:
            return json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def _note(self, **content: object) -> None:
        write_text(self.folder / _RECORD, json.dumps(content, indent=2), private=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
