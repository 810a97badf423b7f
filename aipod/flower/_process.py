"""Processes that a federation has started: which of them run, and what they have started."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from aipod._misc.extras import install


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that we started: its id, and when it began, since ids are used again."""

    name: str
    pid: int
    began: str

    @property
    def alive(self) -> bool:
        return began(self.pid) == self.began


def began(pid: int) -> str | None:
    """When a process began, as the system writes it; None when there is no such process."""
    try:
        if os.path.isdir("/proc/self"):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if after_name[0] == "Z" else after_name[19]
        listed = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return listed.stdout.strip() or None
    except OSError:
        return None


def marked(mark: bytes) -> list[int]:
    """The processes with this entry in their environment, as far as we may look at them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if mark in path.read_bytes().split(b"\0") and began(pid) is not None:
                found.append(pid)
    return found


def beside_python(command: str) -> str:
    """The path of a command of this environment; `ValueError` when it is not there."""
    path = Path(sys.executable).parent / command
    if not path.is_file():
        # Flower itself is there, perhaps from a folder that environments share.
        raise ValueError(f"there is no {path}; to add it: {install('flower', anew=True)}")
    return str(path)
