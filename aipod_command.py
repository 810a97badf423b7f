"""The entry point of the `aipod` command.

This module is not part of the package, whose import takes about a second. Ctrl-C during the import
prints one line and exits with code 130, as it does later on.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Runs the command and returns its exit code."""
    # A job that a script starts in the background ignores Ctrl-C; keep it so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _quit)
    from aipod.cli import main as command

    return command()


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once. During a solve, `aipod.cli._watch` replaces this handler.

    Raising KeyboardInterrupt is not reliable: inside an import it can turn into an ImportError, and
    inside a garbage collection callback Python prints it and carries on.
    """
    os.write(2, b"aipod: interrupted\n")
    os._exit(130)
