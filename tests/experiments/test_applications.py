"""What holds for every application: where it starts, what it draws, and what a run keeps of it."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

import aipod
from aipod._report.collect import collect
from aipod._report.page import write_report
from aipod.experiments.base import Picture
from aipod.experiments.config import resolve
from aipod.experiments.execute import execute, picture_figure, prepare
from aipod.experiments.tasks import cleaning, portfolio, tolls, transport
from aipod.runs._folder import RunFolder
from tests.experiments.test_tolls import OPTIONS, braess


@pytest.fixture(scope="module")
def tasks():
    return {
        "portfolio": portfolio.build(portfolio.Options()),
        "transport": transport.build(transport.Options(homes=4, works=3)),
        "cleaning": cleaning.build(cleaning.Options(training=60, validation=40)),
        "tolls": tolls.build_on(braess(), OPTIONS),
    }


def test_every_start_lies_on_its_sets(tasks):
    for name, task in tasks.items():
        problem = task.problem
        off = problem.upper_set.residual(task.x0), problem.lower_set.residual(task.y0, task.x0)
        for miss in jax.tree.leaves(off):
            np.testing.assert_allclose(miss, 0, atol=1e-12, err_msg=name)


def test_check_finds_nothing_to_mend(tasks):
    """The one with the nonlinear coupling; the others are checked against closed forms."""
    task = tasks["tolls"]
    report = aipod.check(task.problem, task.x0, task.y0, key=jax.random.key(0))
    assert [f for f in report.findings if f.status != "ok"] == []
    assert report.hypergradient_error < 1e-6


def test_every_picture_is_drawn(tasks, tmp_path):
    for name, task in tasks.items():
        png, svg = picture_figure(task.picture, task.x0, task.y0, tmp_path / name)
        with Image.open(png) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        # Something in colour, not an empty page.
        assert np.mean(np.ptp(pixels.astype(int), axis=-1) > 60) > 1e-3, name
        assert "<svg" in svg.read_text()
        assert len(task.picture.caption) > 40


def test_a_run_keeps_its_picture_and_the_report_shows_it(tmp_path):
    config = resolve({"experiment": "cleaning", "training": 60, "validation": 40, "steps": 2})
    ready = prepare(config)
    drawn = []
    picture = Picture(lambda figure, x, y: drawn.append((x, y)), "What there is to see.", (2, 1))
    folder = RunFolder(tmp_path / "run")
    folder.create(config.toml())
    task = dataclasses.replace(ready.task, picture=picture)
    summary = execute(dataclasses.replace(ready, task=task), folder)
    ((x, y),) = drawn  # where the run ended
    assert np.any(x != 0)
    assert np.any(y != 0)
    assert summary["picture"] == picture.caption
    assert (folder.figures / "picture.png").read_bytes().startswith(b"\x89PNG")
    write_report(collect([folder.path]), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '<img src="data:image/png;base64,' in text
    assert "<figcaption>What there is to see.</figcaption>" in text
