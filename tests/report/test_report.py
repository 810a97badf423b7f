"""Figures, claims and the HTML page, from run folders whose numbers are known."""

import base64
import dataclasses
import io
import json
import shutil
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aipod._report import claims, curves
from aipod._report.collect import collect
from aipod._report.figures import comparison_figure, run_figure
from aipod._report.page import write_report
from aipod._report.style import COLOURS
from aipod.experiments.base import Picture
from aipod.experiments.execute import picture_figure
from aipod.runs._folder import RunFolder

METRICS = [
    {"name": "loss", "label": "training loss", "log": True, "better": "smaller"},
    {"name": "gain", "label": "gain", "log": False, "better": "larger"},
]
# What a name in a configuration could do to a page that trusts it.
ATTACK = "</script><script>window.attacked = true</script><img src=x onerror='attacked = true'>"


def write_run(path: Path, *, seed=0, lower_prob=1.0, rows=100, scale=1.0, **more) -> None:
    """A run of `rows` steps with loss scale / step, and five projections of y in each step."""
    step = np.arange(1, rows + 1)
    columns = {
        "step": step,
        "lower_projections": np.round(5 * lower_prob * step),
        "rounds": np.zeros(rows),
        "seconds": 0.01 * step,
        "loss": scale * (1 + 0.1 * seed) / step,
        "gain": -np.sqrt(step),
    }
    config = {"experiment": "made-up", "solver": "e-aipod", "seed": seed, "lower_prob": lower_prob}
    folder = RunFolder(path)
    folder.create("made = true\n")
    folder.write_metrics(columns)
    folder.write_summary(
        {
            "kind": "run",
            "experiment": "made-up",
            "solver": "e-aipod",
            "seed": seed,
            "result": "completed",
            "seconds": 1.5,
            "last": {"step": rows},
            "config": config | more.pop("config", {}),
            "metrics": METRICS,
            "axes": ["lower_projections", "step"],
            "environment": {"python": "3.x", "jax": "0.x"},
        }
        | more
    )


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Two variants with three seeds each, in two panels, as `aipod compare` writes them."""
    place = tmp_path_factory.mktemp("comparison") / "both"
    variants = {"e-aipod:lower_prob=1": (1.0, 1.0), "e-aipod:lower_prob=0.1": (0.1, 1.02)}
    folders = {name: name.replace(":", "_") for name in variants}
    for name, (prob, scale) in variants.items():
        for seed in range(3):
            path = place / "runs" / folders[name] / f"seed-{seed}"
            write_run(path, seed=seed, lower_prob=prob, scale=scale, config={"data": ATTACK})
    RunFolder(place).write_config("made = true\n")
    panels = [
        {"title": ATTACK, "variants": list(variants)},
        {"title": "Second panel", "variants": list(variants)[::-1]},
    ]
    summary = {"kind": "comparison", "panels": panels, "folders": folders}
    RunFolder(place).write_summary(summary)
    return place


def test_runs_are_grouped_by_all_but_the_seed(comparison):
    (section,) = collect([comparison])
    assert [group.label for group in section.groups] == ["E-AiPOD (p = 1)", "E-AiPOD (p = 0.1)"]
    assert [[run.summary["seed"] for run in group.runs] for group in section.groups] == [
        [0, 1, 2]
    ] * 2
    assert [view.groups[0].label for view in section.views] == [
        "E-AiPOD (p = 1)",
        "E-AiPOD (p = 0.1)",
    ]


def test_a_curve_is_the_median_and_the_range(comparison):
    (section,) = collect([comparison])
    curve = curves.curve(section.groups[0], "loss")
    step = np.arange(1, 101)
    np.testing.assert_allclose(curve.middle, 1.1 / step)
    np.testing.assert_allclose(curve.low, 1.0 / step)
    np.testing.assert_allclose(curve.high, 1.2 / step)


def test_a_variant_that_is_worse_is_named(tmp_path):
    """Also when it is not the cheapest, which has the first sentence."""
    for name, scale, shape in (("good", 1.0, 1.0), ("flat", 2.0, 0.0), ("cheap", 1.1, 1.0)):
        write_run(tmp_path / name, scale=scale, config={"solver": name}, solver=name)
        folder = RunFolder(tmp_path / name)
        columns = folder.read_metrics()
        columns["loss"] = scale * columns["step"] ** -shape
        if name == "cheap":
            columns["lower_projections"] /= 2
        folder.write_metrics(columns)
    section = collect([tmp_path / name for name in ("good", "flat", "cheap")])[0]
    said = claims.sentences(section)
    assert said[0].startswith("After 100 outer steps, cheap has")
    (worse,) = said[1:]
    assert worse == "flat levels off at 200.00 times the training loss of good (2 against 0.01)."


def test_the_claims_are_the_numbers(comparison):
    (section,) = collect([comparison])
    first, second = claims.table(section, section.views[0])
    assert dataclasses.asdict(second) == {
        "label": "E-AiPOD (p = 0.1)",
        "seeds": 3,
        "results": {"completed": 3},
        "step": 100,
        "value": pytest.approx(1.02 * 1.1 / 100),
        "ratio": pytest.approx(1.02),
        "worst": pytest.approx(1.02),
        "cost": 50,
        "cost_ratio": pytest.approx(0.1),
        "seconds": 1.5,
    }
    assert first.ratio == first.cost_ratio == 1
    cheap, dear = claims.sentences(section)
    assert "1.02 times the training loss" in cheap
    assert "for 10 % of its projections of y (50 against 500)" in cheap
    assert "for 10 times its projections of y" in dear


def test_runs_that_ended_early_are_compared_as_far_as_they_came(tmp_path):
    write_run(tmp_path / "whole", lower_prob=1.0)
    write_run(tmp_path / "short", lower_prob=0.5, rows=40, scale=3.0, result="diverged")
    (section,) = collect([tmp_path / "whole", tmp_path / "short"])
    _, short = claims.table(section, section.views[0])
    assert short.step == 40
    assert short.ratio == pytest.approx(3.0)
    assert short.cost_ratio == pytest.approx(0.5)
    assert short.results == {"diverged": 1}


def test_only_axes_on_which_something_moves_are_offered(comparison):
    (section,) = collect([comparison])
    assert curves.available_axes(section.groups) == ["step", "lower_projections", "seconds"]


@pytest.mark.parametrize("length", [1, 5, 400, 401, 10_000])
def test_thinning_keeps_the_ends(length):
    chosen = curves.thinned(length)
    assert chosen[0] == 0
    assert chosen[-1] == length - 1
    assert len(chosen) <= 400
    assert np.all(np.diff(chosen) > 0)


def test_damaged_folders_are_named(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").write_text("step,loss\n1\n")
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged"):
        collect([tmp_path])
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is damaged"):
        collect([tmp_path])


def test_arrays_for_each_step_become_columns(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics({"step": np.arange(2), "bias": np.array([[1.0, 2.0], [3.0, np.nan]])})
    found = folder.read_metrics()
    assert list(found) == ["step", "bias[0]", "bias[1]"]
    np.testing.assert_array_equal(found["bias[1]"], [2.0, np.nan])


# Figures.


def share_of(colour: np.ndarray, path: Path) -> float:
    """How much of a picture has this colour."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    return float(np.mean(np.abs(pixels - colour).max(axis=-1) <= 2))


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def test_the_figure_of_a_comparison(comparison, tmp_path):
    (section,) = collect([comparison])
    picture, drawing = comparison_figure(section, tmp_path)
    for colour in COLOURS[:2]:
        assert share_of(rgb(colour), picture) > 1e-3
    # The first line's band over the seeds: its colour at 18 % on white.
    assert share_of(255 * 0.82 + rgb(COLOURS[0]) * 0.18, picture) > 1e-3
    assert "E-AiPOD (p = 0.1)" in drawing.read_text()  # as a comment beside its glyphs


def test_the_figure_of_a_run(tmp_path):
    write_run(tmp_path / "run")
    (section,) = collect([tmp_path / "run"])
    picture, _ = run_figure(section, tmp_path)
    for colour in COLOURS[:2]:
        assert share_of(rgb(colour), picture) > 1e-4


def test_a_page_shows_the_pictures_that_the_runs_drew(tmp_path):
    """An experiment's own picture, inside the page, with its caption as text and nothing else."""
    picture = Picture(lambda figure, x, y: figure.subplots().plot(x, y), ATTACK, size=(3, 2))
    for seed, caption in ((0, picture.caption), (1, "not the first seed")):
        write_run(tmp_path / f"run-{seed}", seed=seed, picture=caption)
        picture_figure(picture, [0, 1], [0, 1], RunFolder(tmp_path / f"run-{seed}").figures)
    write_run(tmp_path / "without", lower_prob=0.5)
    write_report(collect([tmp_path]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    png = (tmp_path / "run-0" / "figures" / "picture.png").read_bytes()
    assert text.count("<figure>") == 1
    assert base64.b64encode(png).decode() in text
    assert f"<figcaption>E-AiPOD (p = 1), seed 0. {escape(ATTACK)}</figcaption>" in text
    assert "<svg" in (tmp_path / "run-0" / "figures" / "picture.svg").read_text()


# The page in a real browser.

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium; on Debian and Ubuntu: apt-get install -y chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, headless=True)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(comparison):
    path = comparison / "report.html"
    write_report(collect([comparison]), path)
    return path


@pytest.fixture
def opened(browser, report):
    """Opens the report in a window of its own; fails the test on whatever the console says."""
    complaints, requests, pages = [], [], []

    def open_(**options):
        page = browser.new_page(**options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.context.set_offline(True)
        page.goto(report.as_uri())
        page.wait_for_selector(".chart .scatterlayer .js-line")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def chart(page, expression: str):
    return page.evaluate(
        f"(() => {{ const c = document.querySelector('.chart'); return {expression} }})()"
    )


def lines(page) -> list[dict]:
    """The lines in the chart, without the edges of the bands."""
    return [line for line in json.loads(chart(page, "JSON.stringify(c.data)")) if line.get("name")]


def test_the_page_draws_what_was_measured(opened):
    page = opened()
    first, second = lines(page)
    assert first["name"] == "E-AiPOD (p = 1)"
    assert second["name"] == "E-AiPOD (p = 0.1)"
    assert first["x"][-1] == 500
    assert second["x"][-1] == 50
    assert first["y"][0] == pytest.approx(1.1)
    assert len(chart(page, "c.data")) == 6  # each line with the two edges of its band
    assert "1.02 times the training loss" in page.inner_text(".findings")
    assert "E-AiPOD (p = 0.1)" in page.inner_text("table >> nth=0")
    assert "lower_prob" in page.inner_text("main")
    assert "0.x" in page.inner_text("main")  # the version of JAX


def test_the_menus_change_the_chart(opened):
    page = opened()
    titles = "c.querySelector('.xtitle').textContent + '|' + c.querySelector('.ytitle').textContent"
    assert chart(page, titles) == "projections of y|training loss"
    page.get_by_label("Horizontal axis").select_option("seconds")
    assert lines(page)[0]["x"][-1] == 1.0
    page.get_by_label("Vertical axis").select_option("gain")
    assert lines(page)[0]["y"][-1] == -10
    assert chart(page, titles) == "computing time (s)|gain"
    assert chart(page, "c.layout.yaxis.type") == "linear"  # a gain below zero has no logarithm
    page.get_by_label("log x").check()
    assert chart(page, "c.layout.xaxis.type") == "log"
    page.get_by_label("range over seeds").uncheck()
    assert len(chart(page, "c.data")) == 2
    page.get_by_label("Compare").select_option(label="Second panel")
    assert lines(page)[0]["name"] == "E-AiPOD (p = 0.1)"
    page.get_by_label("E-AiPOD (p = 0.1)", exact=True).uncheck()
    assert [line["name"] for line in lines(page)] == ["E-AiPOD (p = 1)"]


def test_hovering_tells_and_dragging_zooms(opened):
    page = opened(viewport={"width": 1000, "height": 900})
    box = page.locator(".chart .nsewdrag").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    # Somewhere on the vertical line through the middle the pointer meets the curve.
    for share in range(0, 50):
        page.mouse.move(middle[0], box["y"] + box["height"] * share / 50)
        if page.locator(".chart .hovertext").count():
            break
    assert "E-AiPOD" in page.locator(".chart .hovertext").first.text_content()
    before = chart(page, "c.layout.xaxis.range")
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 250, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "before => document.querySelector('.chart').layout.xaxis.range[1] < 0.9 * before",
        arg=before[1],
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "light"), (1280, "dark")])
def test_the_page_is_drawn_at_every_width_and_in_the_dark(opened, width, scheme):
    page = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)
    # Nothing but the tables, which have their own bar, is wider than the window.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture = page.locator(".chart").screenshot()
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).reshape(-1, 3).astype(int)
    assert len(np.unique(pixels, axis=0)) > 100
    paper = np.median(pixels, axis=0)
    assert np.all(paper < 60) if scheme == "dark" else np.all(paper > 240)
    if scheme == "light":
        near = np.abs(pixels - rgb(COLOURS[0])).sum(axis=1) < 20
        assert near.sum() > 100


def test_names_in_a_configuration_are_text_and_nothing_else(opened):
    page = opened()
    assert page.evaluate("window.attacked") is None
    assert ATTACK in page.inner_text("caption >> nth=0")
    assert ATTACK in page.inner_text("table.values >> nth=0")
    assert ATTACK in page.get_by_label("Compare").inner_text()


def test_no_button_sends_the_chart_away(opened):
    titles = [b.get_attribute("data-title") for b in opened().locator(".modebar-btn").all()]
    assert len(titles) > 3
    assert not [title for title in titles if "hare" in title or "loud" in title]


def test_the_page_can_be_used_without_eyes_or_mouse(opened):
    page = opened()
    described = page.get_by_role("figure").get_attribute("aria-label")
    assert "training loss against projections of y" in described
    unnamed = page.evaluate(
        "[...document.querySelectorAll('select, input')].filter(c => !c.labels.length).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    page.get_by_label("Horizontal axis").focus()
    page.keyboard.press("ArrowUp")
    assert chart(page, "c.querySelector('.xtitle').textContent") == "outer steps"


def test_several_experiments_share_a_page(browser, comparison, tmp_path):
    write_run(tmp_path / "other", experiment="other")
    write_report(collect([comparison, tmp_path / "other"]), tmp_path / "page.html")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#section-1 .chart .scatterlayer .js-line")
    assert page.locator(".chart").count() == 2
    page.close()
