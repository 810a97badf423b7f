"""Folders of somebody else's: what the page takes from them, and what it does not."""

import base64
import json
import os
from pathlib import Path

import numpy as np
import pytest

from aipod._report.collect import collect
from aipod._report.page import write_report
from aipod._report.studies import studies
from aipod.experiments.studies import rates, table1
from aipod.runs._folder import RunFolder
from tests.report.test_report import write_run

PNG = b"\x89PNG\r\n\x1a\n"


def text_of(path: Path, out: Path) -> str:
    write_report(collect([path]), out, studies([path]))
    return out.read_text()


@pytest.fixture
def with_picture(tmp_path):
    """A run whose figures are still to be made."""
    write_run(tmp_path / "run", picture="A caption.")
    figures = tmp_path / "run" / "figures"
    figures.mkdir()
    return figures


def shown(figures: Path) -> bool:
    return "<figcaption>A caption." in text_of(figures.parent, figures.parent.parent / "page.html")


def test_a_picture_is_put_into_the_page(with_picture):
    (with_picture / "picture.png").write_bytes(PNG + b"drawn")
    assert shown(with_picture)
    # A link inside the folder is as good.
    os.rename(with_picture / "picture.png", with_picture / "other.png")
    (with_picture / "picture.png").symlink_to("other.png")
    assert shown(with_picture)


@pytest.mark.parametrize("kind", ["file", "folder", "text", "pipe", "huge", "dangling"])
def test_nothing_else_is(with_picture, tmp_path, kind):
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG + b"a secret")
    picture = with_picture / "picture.png"
    if kind == "file":
        picture.symlink_to(secret)
    elif kind == "folder":
        with_picture.rmdir()
        (tmp_path / "elsewhere").mkdir()
        os.link(secret, tmp_path / "elsewhere" / "picture.png")
        with_picture.symlink_to(tmp_path / "elsewhere")
    elif kind == "text":
        picture.write_text("a secret")
    elif kind == "pipe":
        os.mkfifo(picture)
    elif kind == "huge":
        picture.write_bytes(PNG)
        os.truncate(picture, 30_000_000)
    else:
        picture.symlink_to(tmp_path / "nowhere.png")
    assert not shown(with_picture)
    page = (tmp_path / "page.html").read_text()
    assert base64.b64encode(b"a secret").decode()[:8] not in page
    assert "a secret" not in page


def test_a_run_copied_into_a_comparison_comes_last(tmp_path):
    place = tmp_path / "both"
    write_run(place / "runs" / "one" / "seed-0", lower_prob=0.1)
    write_run(place / "copied" / "aaa", lower_prob=1.0)
    folder = RunFolder(place)
    folder.write_config("made = true\n")
    panels = [{"title": "", "variants": ["e-aipod"]}]
    folder.write_summary({"kind": "comparison", "folders": {"e-aipod": "one"}, "panels": panels})
    (section,) = collect([place])
    assert [group.config["lower_prob"] for group in section.groups] == [0.1, 1.0]
    assert len(section.views[0].groups) == 1


def test_a_comparison_of_which_only_other_runs_are_left(tmp_path):
    place = tmp_path / "both"
    write_run(place / "runs" / "other" / "seed-0")
    folder = RunFolder(place)
    folder.write_config("made = true\n")
    panels = [{"title": "", "variants": ["e-aipod"]}]
    folder.write_summary({"kind": "comparison", "folders": {"e-aipod": "one"}, "panels": panels})
    (section,) = collect([place])
    assert len(section.views) == 1


def test_summaries_of_others_are_left_alone(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{ not ours")
    assert len(collect([tmp_path])) == 1


def test_runs_that_recorded_different_things(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", lower_prob=0.5)
    folder = RunFolder(tmp_path / "two")
    columns = folder.read_metrics()
    folder.write_metrics({name: c for name, c in columns.items() if name != "gain"})
    (section,) = collect([tmp_path])
    assert [metric["name"] for metric in section.metrics] == ["loss"]
    folder.write_metrics({**{name: c for name, c in columns.items() if name != "loss"}})
    (section,) = collect([tmp_path])
    assert [metric["name"] for metric in section.metrics] == ["gain"]
    summary = folder.read_summary()
    first = RunFolder(tmp_path / "one")
    first.write_metrics({name: c for name, c in columns.items() if name != "gain"})
    with pytest.raises(ValueError, match="recorded different things"):
        collect([tmp_path])
    assert summary["metrics"]


def test_half_a_character_does_not_stop_the_page(tmp_path):
    write_run(tmp_path / "run", config={"data": "\ud83d"})
    assert "E-AiPOD" in text_of(tmp_path / "run", tmp_path / "page.html")


# What `aipod rates` and `aipod compare table1` write.


def rate_rows() -> list[dict]:
    measured = {"value": 2.04, "low": 1.9, "high": 2.18}
    row = {"problem": "synthetic", "method": "AiPOD", "cost": "samples", "claimed": 2.0}
    again = row | {"cost": "lower projections", "counted": None, "measured": None}
    return [
        row | {"counted": 2.0, "measured": measured, "note": ""},
        again | {"note": "the error does not <fall>"},
    ]


def write_study(path: Path, kind: str) -> Path:
    folder = RunFolder(path)
    folder.create("steps = 1000\n")
    summary = {"kind": kind, "seeds": 2, "steps": 1000, "environment": {"python": "3.x"}}
    if kind == "rates":
        summary |= {"rows": rate_rows()}
        table = rates.markdown(summary)
    else:
        refused = dict.fromkeys(table1.PROBLEMS)
        method = {"name": "aipod", "label": "AiPOD", "noise": None, "refused": refused}
        summary |= {"accuracies": [0.3], "methods": [method], "rows": []}
        table = table1.markdown(summary)
    folder.write_summary(summary)
    (path / "table.md").write_text(table)
    folder.figures.mkdir()
    (folder.figures / f"{kind}.png").write_bytes(PNG + b"drawn")
    return path


def test_measured_rates_are_shown_with_their_table_and_figure(tmp_path):
    text = text_of(write_study(tmp_path / "rates", "rates"), tmp_path / "page.html")
    assert "<h2>Measured rates</h2>" in text
    assert "<td>1.90 to 2.18</td>" in text
    assert "the error does not &lt;fall&gt;" in text
    assert base64.b64encode(PNG + b"drawn").decode() in text
    assert "Runs of up to 1,000 outer steps, 2 of each" in text
    assert len(text) < 100_000  # no charts, and nothing to draw them with


def test_table_1_is_shown_with_both_of_its_tables(tmp_path):
    text = text_of(write_study(tmp_path / "table1", "table1"), tmp_path / "page.html")
    assert "<h2>Table 1, measured</h2>" in text
    assert text.count("<thead>") == 3  # those and the environment
    assert "samples to 0.3" in text


def test_runs_and_measurements_share_a_page(tmp_path):
    write_study(tmp_path / "rates", "rates")
    write_run(tmp_path / "run")
    text = text_of(tmp_path, tmp_path / "page.html")
    assert '<section id="section-0"' in text
    assert '<section id="study-0"' in text
    assert "1 run; written by aipod" in text


@pytest.mark.parametrize("content", ["", "no table", "| a | b |\n|---|---|\n| 1 |\n"])
def test_a_damaged_table_is_named(tmp_path, content):
    write_study(tmp_path / "rates", "rates")
    (tmp_path / "rates" / "table.md").write_text(content)
    with pytest.raises(ValueError, match=r"table\.md is damaged"):
        studies([tmp_path])
    (tmp_path / "rates" / "table.md").unlink()
    with pytest.raises(ValueError, match=r"has no table\.md"):
        studies([tmp_path])


def test_a_summary_without_its_numbers_is_named(tmp_path):
    write_study(tmp_path / "rates", "rates")
    (tmp_path / "rates" / "summary.json").write_text(json.dumps({"kind": "rates"}))
    with pytest.raises(ValueError, match=r"summary\.json is damaged \(seeds"):
        studies([tmp_path])


def test_columns_of_two_seeds_may_differ_in_length(tmp_path):
    for seed, rows in ((0, 5), (1, 3)):
        write_run(tmp_path / f"seed-{seed}", seed=seed, rows=rows)
    (section,) = collect([tmp_path])
    assert np.size(section.groups[0].runs[0].columns["step"]) == 5
    assert "E-AiPOD" in text_of(tmp_path, tmp_path / "page.html")
