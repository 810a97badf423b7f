"""The installed `aipod` command, run as people run it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from aipod.cli._watch import Watch
from aipod.runs._folder import RunFolder
from tests.cli.lines import answer_all

COMMAND = shutil.which("aipod", path=str(Path(sys.executable).parent))
# Small enough that starting Python and compiling is all that takes time.
TINY = "synthetic --dimension 6 --lower-rank 2 --upper-rank 2"


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """The command compiles the same small programs again and again: let it find them."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("jax"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def start(line: str, cwd: Path, **options) -> subprocess.Popen:
    assert COMMAND, "install the package first: make test does it"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.Popen(
        [COMMAND, *line.split()],
        cwd=cwd,
        env=environment | {"NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def aipod(line: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    process = start(line, cwd)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, (line, out, err)
    assert "Traceback" not in err
    return subprocess.CompletedProcess(line, code, out, err)


def only_json(result: subprocess.CompletedProcess) -> dict:
    """Standard output as one JSON object; NaN and infinity are none."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def same_metrics(first: Path, second: Path) -> None:
    one, two = (RunFolder(path).read_metrics() for path in (first, second))
    assert list(one) == list(two)
    for name in one:
        if name != "seconds":
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)


# Help and list.


def test_help_teaches(tmp_path):
    shown = aipod("run synthetic --help", tmp_path).stdout
    for words in ("--lower-prob", "--dimension", "--resume", "Examples", "130", "config.toml"):
        assert words in shown
    top = aipod("", tmp_path).stdout
    assert all(verb in top for verb in ("list", "run", "compare", "report", "check"))


def test_list(tmp_path):
    assert "e2-aipod" in aipod("list", tmp_path).stdout
    found = only_json(aipod("list --json", tmp_path))
    assert set(found["solvers"]) >= {"aipod", "e-aipod", "e2-aipod"}
    assert "synthetic" in found["experiments"]


# One run, and everything about it.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with all it can write; (folder, what it printed)."""
    place = tmp_path_factory.mktemp("run")
    line = f"run {TINY} --steps 60 --every 2 --seed 3 --out runs/one --tensorboard --json"
    return place / "runs" / "one", aipod(line, place)


def test_a_run_prints_one_object_and_writes_a_folder(run):
    folder, printed = run
    found = only_json(printed)
    assert found["result"] == "completed"
    assert found["last"]["step"] == found["steps"] == 60
    assert found["ledger"]["upper_projections"] == 60
    assert found["last"]["error"] == pytest.approx(
        found["last"]["stationarity"] + found["last"]["lower_gap"]
    )
    assert "first" not in found  # only where there is an accuracy to reach
    assert found.pop("folder") == "runs/one"
    assert json.loads((folder / "summary.json").read_text()) == found
    assert "aipod report runs/one" in printed.stderr
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["lower_prob"] == 0.3
    assert config["dimension"] == 6
    assert list((folder / "checkpoint").glob("step-*.npz"))
    assert (folder / "figures" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figures" / "metrics.svg").read_text()


def test_the_metrics_of_a_run(run):
    folder, _ = run
    metrics = RunFolder(folder).read_metrics()
    np.testing.assert_array_equal(metrics["step"], np.arange(2, 61, 2))
    assert np.all(np.diff(metrics["seconds"]) >= 0)
    assert metrics["seconds"][-1] > 0
    running = np.cumsum(metrics["error"]) / np.arange(1, 31)
    np.testing.assert_allclose(metrics["running_error"], running, rtol=1e-5)
    kinds = [metrics[f"{kind}_projections"] for kind in ("upper", "lower", "adjoint")]
    np.testing.assert_array_equal(metrics["projections"], np.sum(kinds, axis=0))


def test_parquet_holds_the_same_metrics(run):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, _ = run
    table = parquet.read_table(folder / "metrics.parquet").to_pydict()
    for name, column in RunFolder(folder).read_metrics().items():
        np.testing.assert_allclose(table[name], column, rtol=1e-6)


def test_event_files_are_read_back(run):
    """The record format: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    folder, _ = run
    (file,) = (folder / "tensorboard").iterdir()
    content, found, count = file.read_bytes(), {}, 0
    while content:
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
            count += value.tag == "error"
        content = content[16 + length :]
    metrics = RunFolder(folder).read_metrics()
    assert list(found["error"]) == list(metrics["step"])
    assert count == 30  # each of them once
    np.testing.assert_allclose(list(found["error"].values()), metrics["error"], rtol=1e-6)


def test_nothing_tells_whose_machine_it_was(run):
    folder, _ = run
    for file in ("config.toml", "summary.json", "metrics.csv"):
        text = (folder / file).read_text()
        assert socket.gethostname() not in text
        assert str(Path.home()) + "/" not in text
        assert str(folder.parent) not in text


def test_the_configuration_repeats_the_run(run, tmp_path):
    folder, _ = run
    aipod(f"run --config {folder / 'config.toml'} --out again", tmp_path)
    same_metrics(folder, tmp_path / "again")


def test_a_folder_is_never_overwritten_without_force(run, tmp_path):
    folder, _ = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "notes.txt").write_text("mine")
    line = f"run {TINY} --steps 3 --out {copy}"
    assert "--force" in aipod(line, tmp_path, 2).stderr
    same_metrics(folder, copy)
    aipod(f"{line} --force", tmp_path)
    assert len(RunFolder(copy).read_metrics()["step"]) == 3
    assert not (copy / "tensorboard").exists()
    assert (copy / "notes.txt").read_text() == "mine"


def test_names_win_in_order_and_folders_are_numbered(tmp_path):
    """The file, then options, then --set; and two runs without --out get two folders."""
    (tmp_path / "f.toml").write_text(
        'experiment = "synthetic"\nsteps = 4\nlower_prob = 0.5\nlower_steps = 2\nnoise = 0.2\n'
        "dimension = 6\nlower_rank = 2\nupper_rank = 2\n"
    )
    line = "run --config f.toml --lower-prob 0.4 --noise 0 --set lower_prob=0.25 --x64 --json"
    found = only_json(aipod(line, tmp_path))
    assert found["folder"] == "runs/synthetic-e-aipod-001"
    expected = {"steps": 4, "lower_prob": 0.25, "lower_steps": 2, "noise": 0.0, "x64": True}
    assert {name: found["config"][name] for name in expected} == expected
    shown = aipod("run --config f.toml --upper-optimizer adam(0.01) --lower-lr curvature", tmp_path)
    assert "running average of the error" in shown.stdout
    config = tomllib.loads((tmp_path / "runs/synthetic-e-aipod-002/config.toml").read_text())
    assert config["upper_optimizer"] == "adam(0.01)"
    assert config["lower_lr"] == "curvature"
    assert "upper_lr" not in config


# Ends other than the planned one.


def test_divergence_has_its_own_exit_code_and_keeps_the_last_good_state(tmp_path):
    result = aipod(f"run {TINY} --lower-lr 300 --out bad --json", tmp_path, 3)
    found = only_json(result)
    assert found["result"] == "diverged"
    assert "lower_lr=150" in result.stderr
    (saved,) = (tmp_path / "bad" / "checkpoint").glob("step-*.npz")
    with np.load(saved) as content:
        # The watch squares what the iterates are, and overflows before them.
        state = [n for n in content.files if n.startswith("state") and ".watch" not in n]
        assert all(np.all(np.isfinite(content[n])) for n in state)


def interrupted(process: subprocess.Popen, sign: str) -> tuple[str, str]:
    """Sends Ctrl-C once the command has written a line with this sign."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if sign in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (seen, out, err)
    return out, "".join(seen) + err


def test_ctrl_c_saves_everything_and_resume_changes_nothing(tmp_path):
    process = start(f"run {TINY} --steps 100000000 --every 50 --out one --json", tmp_path)
    out, err = interrupted(process, "steps/s")
    found = json.loads(out)
    assert found["result"] == "interrupted"
    assert "aipod run --resume --out one" in err
    done = found["steps"]
    assert list((tmp_path / "one" / "checkpoint").glob(f"step-*{done}.npz"))

    assert "lower_prob is 0.3" in aipod("run --resume --out one --lower-prob 1", tmp_path, 2).stderr
    more = only_json(aipod(f"run --resume --out one --steps {done + 60} --json", tmp_path))
    assert more["result"] == "completed"
    assert more["steps"] == done + 60
    aipod(f"run {TINY} --steps {done + 60} --every 50 --out whole", tmp_path)
    same_metrics(tmp_path / "one", tmp_path / "whole")


def test_the_second_ctrl_c_does_not_wait():
    with Watch() as watch:
        os.kill(os.getpid(), signal.SIGTERM)  # a polite kill is a Ctrl-C
        assert watch.stopped
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path):
    line = f"compare {TINY} --solvers aipod,e-aipod:lower_prob=0.1 --seeds 2 --out both"
    process = start(f"{line} --steps 4000", tmp_path)
    _, err = interrupted(process, "1/4 aipod, seed 0: completed")
    assert "aipod compare --resume --out both" in err
    first = tmp_path / "both" / "runs" / "aipod" / "seed-0" / "metrics.csv"
    before = first.stat().st_mtime_ns
    shown = aipod("compare --resume --out both", tmp_path)
    assert "1/4 aipod" not in shown.stderr
    assert first.stat().st_mtime_ns == before
    assert "E-AiPOD (p = 0.1)" in shown.stdout
    assert len(list((tmp_path / "both").rglob("summary.json"))) == 5


def test_a_comparison_of_which_nothing_was_recorded(tmp_path):
    line = f"compare {TINY} --solvers aipod --seeds 1 --lower-lr 1e38 --every 50 --out c --json"
    result = aipod(line, tmp_path, 3)
    assert only_json(result)["tables"] == []
    assert "choose smaller steps" in result.stderr
    assert "no finished run in c" in aipod("report c", tmp_path, 2).stderr


# The comparison of the paper's Figure 1.


def test_a_comparison_states_the_claim_of_figure_1_and_the_report_shows_it(tmp_path):
    folder = tmp_path / "figure"
    found = only_json(
        aipod("compare synthetic --seeds 2 --steps 1000 --out figure --json", tmp_path)
    )
    the_claim_holds(found)
    assert (folder / "figures" / "comparison.png").stat().st_size > 20_000
    assert (folder / "figures" / "comparison.svg").is_file()
    # Six different runs, of which one stands in both halves of the figure.
    assert len(list(folder.glob("runs/*/seed-*/config.toml"))) == 12
    the_report_is_written(folder, tmp_path)


def the_claim_holds(found: dict) -> None:
    """The same error at the same outer step, for a tenth of the projections of y."""
    probabilities, against = found["tables"]
    rows = {row["label"]: row for row in probabilities["rows"]}
    assert list(rows) == [f"E-AiPOD (p = {p}, T = 1)" for p in ("1", "0.5", "0.3", "0.1")]
    seldom = rows["E-AiPOD (p = 0.1, T = 1)"]
    # 3 % over twenty seeds; two of them may be a little further off.
    assert abs(seldom["ratio"] - 1) < 0.1
    assert seldom["worst"] < 1.2
    assert 0.09 < seldom["cost_ratio"] < 0.11
    assert seldom["step"] == 1000
    # With p = 1 and T = 1 E-AiPOD is AiPOD.
    assert against["rows"][0]["label"] == "AiPOD"
    assert against["rows"][0]["value"] == pytest.approx(probabilities["rows"][0]["value"], rel=1e-3)
    assert "1,000 outer steps" in found["sentences"][0]


def the_report_is_written(folder: Path, tmp_path: Path) -> None:
    shown = aipod(f"report {folder}", tmp_path)
    assert "report.html" in shown.stdout
    page = (folder / "report.html").read_text()
    assert "E-AiPOD (p = 0.1, T = 1)" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", page)
    # A report may be renewed; any other file is left alone.
    found = only_json(aipod(f"report {folder} --json", tmp_path))
    # Two claims, and that T = 2 levels off above AiPOD.
    assert len(found["sentences"]) == 3
    assert "levels off" in found["sentences"][2]
    other = tmp_path / "thesis.html"
    other.write_text("<p>years of work</p>")
    assert "not a report" in aipod(f"report {folder} --out {other}", tmp_path, 2).stderr
    assert other.read_text() == "<p>years of work</p>"


# Checking problems.

PROBLEM = """
import jax.numpy as jnp
import aipod

def make(sign):
    return aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((x - y) ** 2),
        lower=lambda x, y, _: sign * jnp.sum((y - 2 * x) ** 2),
        lower_set=aipod.Budget(1.0),
    )

x0, y0 = jnp.zeros(3), jnp.ones(3) / 3
good, concave, number = make(1.0), make(-1.0), 3

def both():
    return good, x0, y0

def broken():
    return 1 / 0
"""


def test_check(tmp_path):
    (tmp_path / "mine.py").write_text(PROBLEM)
    assert "0 errors" in aipod("check mine:good", tmp_path).stdout
    found = only_json(aipod("check mine.py:both --json", tmp_path))
    assert found["ok"]
    assert found["hypergradient_error"] < 1e-6  # in double precision, without asking for it
    assert re.search("lower curvature +error", aipod("check mine:concave", tmp_path, 2).stdout)
    assert only_json(aipod(f"check {TINY} --json", tmp_path))["dimensions"]["lower_set"] == 4


# Bad input: one line that says what and how to put it right, exit code 2.

BAD = {
    "": ("frobnicate", "No such command 'frobnicate'"),
    "no experiment": ("run", "aipod list"),
    "unknown experiment": ("run synthetik", "Did you mean synthetic?"),
    "unknown solver": ("run synthetic --solver eaipod", "Did you mean e-aipod?"),
    "unknown option": ("run synthetic --lower-porb 1", "--lower-prob"),
    "unknown name": ("run synthetic --set lower_porb=1", "Did you mean lower_prob?"),
    "argument of another solver": (
        "run synthetic --solver aipod --lower-prob 0.1",
        "aipod has no argument lower_prob: aipod takes upper_lr",
    ),
    "no number": ("run synthetic --lower-prob often", "lower_prob must be a number"),
    "impossible probability": ("run synthetic --lower-prob 2", "probability in (0, 1]"),
    "impossible steps": ("run synthetic --steps 0", "steps must be a whole number, at least 1"),
    "no whole number": ("run synthetic --steps many", "valid integer"),
    "impossible seed": ("run synthetic --seed -1", "seed must be"),
    "impossible option": ("run synthetic --lower-rank 100", "lower_rank must be from 1 to 99"),
    "impossible combination": ("run synthetic --solver e2-aipod --out new", "need h = 0"),
    "unknown optimiser": ("run synthetic --upper-optimizer magic(1)", "adam(0.003)"),
    "no assignment": ("run synthetic --set lower_prob", "name=value"),
    "no config": ("run --config none.toml", "there is no file none.toml"),
    "broken config": ("run --config broken.toml", "broken.toml is not valid TOML"),
    "config with tables": ("run --config tables.toml", "[solver]"),
    "config of a comparison": ("run --config comparison.toml", "no option 'seeds'"),
    "unwritable": ("run synthetic --out file/run", "choose another path"),
    "somebody's folder": ("run synthetic --out full --force", "not a run's"),
    "resume nothing": ("run synthetic --resume --out none", "no run to go on with"),
    "resume nowhere": ("run synthetic --resume", "--out"),
    "compare unknown": ("compare synthetic --solvers aipod,magic", "no solver 'magic'"),
    "compare no seeds": ("compare synthetic --seeds 0", "seeds must be"),
    "compare useless": ("compare synthetic --solvers aipod --lower-prob 1", "none of the compared"),
    "report nothing": ("report none", "there is no folder none"),
    "report empty": ("report full", "no finished run in full"),
    "check unknown": ("check synthetik", "Did you mean synthetic?"),
    "check no module": ("check none:problem", "no module 'none'"),
    "check no file": ("check none.py:problem", "no file none.py"),
    "check no name": ("check mine:god", "Did you mean good?"),
    "check no problem": ("check mine:number", "must be an aipod.Bilevel"),
    "check raises": ("check mine:broken", "ZeroDivisionError"),
}


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    place = tmp_path_factory.mktemp("messy")
    (place / "broken.toml").write_text("steps = \n")
    (place / "tables.toml").write_text('experiment = "synthetic"\n[solver]\nname = "aipod"\n')
    (place / "comparison.toml").write_text('experiment = "synthetic"\nseeds = 2\n')
    (place / "file").write_text("")
    (place / "full").mkdir()
    (place / "full" / "thesis.tex").write_text("")
    (place / "mine.py").write_text(PROBLEM)
    return place


@pytest.fixture(scope="module")
def answers(messy):
    found = answer_all([line.split() for line, _ in BAD.values()], messy)
    return dict(zip(BAD, found, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_in_one_line(name, answers, messy):
    _, words = BAD[name]
    code, out, err = answers[name]
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    message = [text for text in err.splitlines() if text.startswith("aipod: ")]
    assert len(message) == 1
    assert words in message[0]
    assert not (messy / "new").exists()


def test_the_command_itself_ends_with_the_code(messy):
    result = aipod("run synthetik", messy, 2)
    assert result.stdout == ""
    assert "Did you mean synthetic?" in result.stderr


def test_debug_shows_the_traceback(tmp_path):
    process = start("run synthetic --lower-prob 2 --debug", tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("missing", "line", "remedy"),
    [
        ("typer", "list", '"typer>='),
        ("tensorboardX", "run synthetic --tensorboard", '-m pip install "tensorboard'),
    ],
)
def test_a_missing_extra_is_named(missing, line, remedy, tmp_path):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"from aipod.cli import main; sys.exit(main({line.split()!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert remedy in found.stderr
    assert "Traceback" not in found.stderr
