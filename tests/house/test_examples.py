"""What people copy must run: the README's Python, and the scripts in examples/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("code", README, ids=lambda code: code.splitlines()[0])
def test_the_readme_runs(code):
    run([sys.executable, "-c", code])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_run(script):
    run([sys.executable, str(script)])


def run(command):
    # As a newcomer has it: a process of its own, float32. Only the compiler hurries as it does in
    # the whole suite.
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "nan" not in found.stdout
