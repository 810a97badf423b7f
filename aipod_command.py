"""The entry point of the `aipod` command.

It stands outside the package, because importing that takes a second: Ctrl-C in this second ends the
command in one line with exit code 130, as it does later.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Runs the command and returns its exit code."""
    # A command in the background of a script ignores Ctrl-C, and goes on doing so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _quit)
    from aipod.cli import main as command

    return command()


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once; while it solves, `aipod.cli._watch` saves everything first.

    An exception would not do: raised inside an import or a callback of the garbage collector, it
    becomes an ImportError, or is printed and forgotten.
    """
    os.write(2, b"aipod: interrupted\n")
    os._exit(130)
