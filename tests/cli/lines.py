"""Many lines of the command in one process, which starts JAX once."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ANSWER_ALL = """
import contextlib, io, json, sys
from aipod.cli import main
found = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    found.append((code, out.getvalue(), err.getvalue()))
json.dump(found, sys.stdout)
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def answer_all(lines: Sequence[list[str]], cwd: Path) -> list[Answer]:
    """What the command answers to each line; whatever it does ends with `main`."""
    found = subprocess.run(
        [sys.executable, "-c", ANSWER_ALL],
        input=json.dumps(list(lines)),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Answer(*one) for one in json.loads(found.stdout)]


def refused(answer: Answer, words: str) -> None:
    """Exit code 2, and one line that says what is wrong."""
    assert (answer.code, answer.out) == (2, ""), answer
    (line,) = answer.err.splitlines()
    assert line.startswith("aipod: ")
    assert words in line
    assert len(line) < 1000
    assert line.count("Did you mean") <= 1
