"""A run folder is written whole, and whatever lies in one that is read gets one sentence."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from aipod._report.collect import collect
from aipod.runs._folder import RunFolder

SUMMARY = {
    "kind": "run",
    "experiment": "made-up",
    "solver": "e-aipod",
    "seed": 0,
    "result": "completed",
    "seconds": 1.5,
    "last": {"step": 3, "loss": None},
    "config": {"experiment": "made-up", "solver": "e-aipod", "seed": 0},
    "metrics": [{"name": "loss", "label": "loss", "log": True, "better": "smaller"}],
    "axes": ["step"],
    "environment": {"python": "3.x"},
}
COMPARISON = {
    "kind": "comparison",
    "panels": [{"title": "", "variants": ["aipod"]}],
    "folders": {"aipod": "aipod"},
}


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path / "run")
    found.create('experiment = "made-up"\n')
    found.write_metrics({"step": np.arange(1, 4), "loss": np.array([3.0, 2.0, 1.0])})
    found.write_summary(SUMMARY)
    return found


def replace(path: Path, content: str | bytes | None) -> None:
    """None for a folder in place of the file."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)


def changed(**changes):
    return json.dumps({name: v for name, v in (SUMMARY | changes).items() if v != "missing"})


SUMMARIES = {
    "empty": "",
    "half": json.dumps(SUMMARY)[:50],
    "a list": "[1, 2]",
    "a number": "3",
    "null": "null",
    "text": '"summary"',
    "deep": "[" * 100_000,
    "huge number": "1" * 10_000,
    "not UTF-8": b"\xff\xfe{}",
    "NUL bytes": b"\x00" * 100,
    "a folder": None,
    "no experiment": changed(experiment="missing"),
    "experiment a list": changed(experiment=["made-up"]),
    "seed a text": changed(seed="0"),
    "last a list": changed(last=[1]),
    "last of texts": changed(last={"step": "three"}),
    "config null": changed(config=None),
    "no metrics": changed(metrics=[]),
    "metrics of texts": changed(metrics=["loss"]),
    "metric without a label": changed(metrics=[{"name": "loss", "log": True, "better": "smaller"}]),
    "axes a text": changed(axes="step"),
    "axes empty": changed(axes=[]),
    "seconds a text": changed(seconds="long"),
    "environment a text": changed(environment="here"),
    "panels of a comparison": json.dumps(COMPARISON | {"panels": {}}),
    "folders of a comparison": json.dumps(COMPARISON | {"folders": []}),
    "a variant without a folder": json.dumps(COMPARISON | {"folders": {}}),
}
METRICS = {
    "empty": "",
    "header alone": "step,loss\n",
    "ragged": "step,loss\n1,2\n3\n",
    "more columns than names": "step,loss\n1,2,3,4\n5,6,7,8\n",
    "the same name twice": "step,step\n1,2\n",
    "words": "step,loss\n1,two\n",
    "NUL bytes": b"\x00" * 100,
    "not UTF-8": b"step,l\xffss\n1,2\n",
    "an endless header": "x" * 300_000,
    "a folder": None,
}


def one_sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("case", SUMMARIES)
def test_a_malformed_summary_gets_one_sentence(folder, case):
    replace(folder.path / "summary.json", SUMMARIES[case])
    with pytest.raises(ValueError, match=r"summary\.json") as error:
        folder.read_summary()
    assert any(word in one_sentence(error) for word in ("is damaged", "cannot be read"))


@pytest.mark.parametrize("case", METRICS)
def test_malformed_metrics_get_one_sentence(folder, case):
    replace(folder.path / "metrics.csv", METRICS[case])
    with pytest.raises(ValueError, match=r"metrics\.csv") as error:
        folder.read_metrics()
    assert any(word in one_sentence(error) for word in ("is damaged", "cannot be read"))


@pytest.mark.parametrize("content", ["steps = = 3", b"\xff\xfe", b"\x00", None])
def test_a_malformed_configuration_gets_one_sentence(folder, content):
    assert folder.read_config() == {"experiment": "made-up"}
    replace(folder.config, content)
    with pytest.raises(ValueError, match=r"config\.toml") as error:
        folder.read_config()
    one_sentence(error)


def test_what_is_missing_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    for read in (folder.read_summary, folder.read_metrics, folder.read_config):
        with pytest.raises(ValueError, match="has no ") as error:
            read()
        one_sentence(error)


def test_a_file_that_may_not_be_read_gets_one_sentence(folder, monkeypatch):
    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    for name in ("summary", "metrics", "config"):
        with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)") as error:
            getattr(folder, f"read_{name}")()
        one_sentence(error)
    monkeypatch.setattr(Path, "is_file", refuse)
    assert not folder.is_run()


@pytest.mark.parametrize(
    ("name", "content"),
    [("summary.json", content) for content in SUMMARIES.values()]
    + [("metrics.csv", content) for content in METRICS.values()],
    ids=[*SUMMARIES, *(f"{name} metrics" for name in METRICS)],
)
def test_the_report_of_a_malformed_folder_is_one_line(folder, name, content):
    replace(folder.path / name, content)
    # The command prints a ValueError as one line.
    with pytest.raises(ValueError, match=re.escape(str(folder.path))) as error:
        collect([folder.path])
    one_sentence(error)


def test_force_removes_links_and_folders_in_the_way_but_not_what_links_point_to(folder, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    folder.figures.symlink_to(kept)
    replace(folder.path / "summary.json", None)
    (folder.path / "metrics.csv").unlink()
    (folder.path / "metrics.csv").symlink_to(kept / "file")
    folder.create("new = true\n", force=True)
    assert (kept / "file").read_text() == "mine"
    assert os.listdir(folder.path) == ["config.toml"]


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match="is not a folder"):
        RunFolder(tmp_path / "run").create("")


def test_what_a_killed_run_left_does_not_stop_the_next_one(tmp_path):
    """It was killed while it wrote its very first file."""
    (tmp_path / "config.toml.tmp123-0123abcd").write_text("half")
    RunFolder(tmp_path).create("whole = true\n")
    assert os.listdir(tmp_path) == ["config.toml"]


# No file may grow beyond a limit, which a process notices as it notices a full disk.
FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from aipod.runs._figures import save
from aipod.runs._folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
large = np.random.default_rng(0).normal(size=20_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
for write in (
    lambda: folder.write_config("x" * 5_000),
    lambda: folder.write_summary({"long": "x" * 5_000}),
    lambda: folder.write_table("x" * 5_000),
    lambda: folder.write_metrics({"step": large}),
    lambda: save(folder.figures, "picture", (3, 3), lambda figure: figure.subplots().plot(large)),
):
    try:
        write()
    except OSError as error:
        print(error.errno)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on files")
def test_a_full_disk_leaves_what_was_there_and_nothing_partial(folder):
    folder.figures.mkdir()
    (folder.figures / "picture.png").write_bytes(b"an older picture")
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder.path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["27"] * 5, done.stderr
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_files_come_back_as_they_were_written(folder):
    assert folder.read_summary() == SUMMARY
    assert folder.read_metrics()["loss"].tolist() == [3.0, 2.0, 1.0]
    assert tomllib.loads(folder.config.read_text()) == folder.read_config()
    assert sorted(os.listdir(folder.path)) == [
        *("config.toml", "metrics.csv", "metrics.parquet", "summary.json")
    ]
