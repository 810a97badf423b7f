"""Terminals, pipes and Ctrl-C: the command under the conditions of a shell."""

import ast
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import aipod.cli
from tests.cli.lines import answer_all, refused

with warnings.catch_warnings():
    # Older versions of Typer use what their click is going to drop.
    warnings.simplefilter("ignore")
    from aipod.cli._options import experiment_in

# What the script that an installation makes does.
SCRIPT = "import sys; from aipod_command import main; sys.exit(main())"
# The same, with a sign of life before anything of the package is imported.
TOLD = "import sys; from aipod_command import main; print('on', flush=True); sys.exit(main())"


def start(line: str, cwd: Path, code: str = SCRIPT, **changed: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *line.split()],
        cwd=cwd,
        env=environment | {"NO_COLOR": "1"} | changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answer(line: str, cwd: Path, **changed: str) -> tuple[int, str, str]:
    process = start(line, cwd, **changed)
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode("ascii"), err.decode("ascii")


# Ctrl-C.


@pytest.mark.parametrize("wait", [0.1, 0.7])
def test_ctrl_c_while_the_package_is_imported(wait, tmp_path):
    """An exception in an import may come out as an ImportError, or not at all."""
    process = start("run tolls", tmp_path, TOLD)
    assert process.stdout.readline() == b"on\n"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"aipod: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_the_program_is_compiled(tmp_path):
    """The folder is there before the compiler starts; the run can then be resumed."""
    process = start("run synthetic --out one --steps 100000000", tmp_path)
    while not (tmp_path / "one" / "config.toml").exists():
        time.sleep(0.01)
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"aipod run --resume --out one" in err


def test_a_command_in_the_background_goes_on_ignoring_ctrl_c(tmp_path):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + TOLD
    process = start("list --json", tmp_path, code)
    assert process.stdout.readline() == b"on\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"synthetic" in out


# Terminals.

ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_terminal_of_plain_ascii_shows_it_all(tmp_path):
    code, out, err = answer("run synthetic --steps 3 --out one", tmp_path, **ASCII)
    assert (code, "Traceback" in err) == (0, False)
    assert "stationarity ||grad F(x)||^2" in out
    code, out, err = answer("run synthetic --help", tmp_path, **ASCII)
    assert code == 0
    assert "step size of x (alpha)" in " ".join(out.split())


def test_names_that_the_terminal_cannot_show_are_spelled(tmp_path):
    code, _, err = answer("report Züri-\N{COLLISION SYMBOL}", tmp_path, **ASCII)
    assert code == 2
    assert err.startswith("aipod: there is no folder ")


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    for line in ("list", "run --help"):
        with start(line, tmp_path) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141


# Typer.


def test_the_version_and_the_completion(tmp_path):
    code, out, _ = answer("--version", tmp_path)
    assert code == 0
    assert out.startswith("aipod ")
    assert len(out.split()) == 2
    code, out, _ = answer(
        "--show-completion bash", tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert code == 0
    assert "_AIPOD_COMPLETE" in out
    home = tmp_path / "home"
    home.mkdir()
    code, out, _ = answer(
        "--install-completion bash",
        tmp_path,
        HOME=str(home),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert code == 0
    assert any(home.rglob("*.sh"))


def test_completion_knows_the_experiments_and_their_options(tmp_path):
    def completed(line: str) -> str:
        words = line.split(" ")
        return answer(
            "",
            tmp_path,
            _AIPOD_COMPLETE="complete_bash",
            COMP_WORDS=line,
            COMP_CWORD=str(len(words) - 1),
        )[1]

    assert "synthetic" in completed("aipod run syn").split()
    assert "--dimension" in completed("aipod run synthetic --dim").split()
    assert "e2-aipod" in completed("aipod run synthetic --solver e2").split()


def test_only_what_typer_exposes_is_used():
    """click is no longer there with new versions of Typer, and their private modules move."""
    for file in Path(aipod.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not [n for n in names if n.split(".")[0] == "click" or n.startswith("typer.")]


def test_an_experiment_is_found_wherever_it_stands():
    assert experiment_in(["run", "--out", "synthetic", "portfolio"]) == "portfolio"
    assert experiment_in(["run", "--json", "synthetic"]) == "synthetic"
    assert experiment_in(["run", "--adjoint-random", "synthetic"]) == "synthetic"
    assert experiment_in(["run", "--solver=aipod", "--out=tolls"]) is None
    assert experiment_in([]) is None


def test_a_configuration_may_be_given_with_an_equals_sign(tmp_path):
    (tmp_path / "f.toml").write_text('experiment = "synthetic"\n')
    (found,) = answer_all([["run", "--config=f.toml", "--dimension", "0"]], tmp_path)
    refused(found, "dimension must be at least 2")
