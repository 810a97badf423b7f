"""Which runs of a comparison are made again when it is resumed."""

import warnings
from types import SimpleNamespace

import pytest

from aipod.runs._folder import RunFolder
from tests.cli.messy import CONFIG, GOOD, METRICS, SUMMARIES, run_folder

with warnings.catch_warnings():
    # Older versions of Typer use what their click is going to drop.
    warnings.simplefilter("ignore")
    from aipod.cli._compare import _finished

RUN = SimpleNamespace(config=SimpleNamespace(toml=lambda: CONFIG))


def finished(path):
    return _finished(RunFolder(path), RUN)


def test_a_run_that_ended_is_kept(tmp_path):
    assert finished(run_folder(tmp_path / "good")) == GOOD
    diverged = GOOD | {"result": "diverged", "last": {}}
    assert finished(run_folder(tmp_path / "diverged", diverged, None)) == diverged


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_damaged_summary_is_made_again(name, tmp_path):
    assert finished(run_folder(tmp_path / "run", SUMMARIES[name])) is None


@pytest.mark.parametrize("name", METRICS)
def test_damaged_metrics_are_made_again(name, tmp_path):
    path = run_folder(tmp_path / "run", columns=None)
    (path / "metrics.csv").write_text(METRICS[name])
    assert finished(path) is None


def test_another_or_an_unfinished_run_is_made_again(tmp_path):
    assert finished(tmp_path / "none") is None
    assert finished(run_folder(tmp_path / "other", config="steps = 4\n")) is None
    assert finished(run_folder(tmp_path / "stopped", GOOD | {"result": "interrupted"})) is None
    path = run_folder(tmp_path / "bytes")
    (path / "config.toml").write_bytes(b"\xff\xfe\x00")
    assert finished(path) is None
