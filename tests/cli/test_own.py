"""Tasks in a user's own file: run, compare, report, resume, and what is refused."""

import json
import tomllib

import pytest

from tests.cli.lines import Answer, answer_all, refused

# At most 40 lines, as the guide promises: what a newcomer writes.
TASK = '''
from typing import Annotated, Literal

import jax.numpy as jnp

import aipod


def task(
    size: Annotated[int, "how many numbers"] = 3,
    weight: float = 0.1,
    kind: Literal["flat", "steep"] = "flat",
    bounded: bool = False,
):
    """A small problem of my own."""
    slope = {"flat": 1.0, "steep": 2.0}[kind]
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + weight * jnp.sum(x**2),
        lower=lambda x, y, _: 0.5 * slope * jnp.sum((y - x) ** 2),
        lower_set=aipod.Simplex() if bounded else aipod.Budget(1.0),
    )
    return problem, jnp.ones(size), jnp.ones(size) / size, lambda x, y: {"loss": jnp.sum(y**2)}


def three():
    return task()[:3]


def needy(size):
    return task(size)


def taken(batch: int = 3):
    return task()


def odd(size: list = ()):
    return task()


def broken():
    return 1 / 0


def silent():
    return (*task()[:3], lambda x, y: {"all": x})


def whole():
    from aipod.experiments import Metric, Task

    shown = Metric("score", "my score", log=False, better="larger")
    problem, x0, y0, _ = task()
    return Task(problem, x0, y0, lambda x, y: {"score": -jnp.sum(y**2)}, metrics=(shown,))


def several():
    """The first name is what is compared, not the first in the alphabet."""
    return (*task()[:3], lambda x, y: {"loss": jnp.sum(y**2), "bias": x[0], "all": x})


number = 3
'''
RUN = ["run", "mine.py:task", "--steps", "20"]
LINES = {
    "run": [*RUN, "--size", "4", "--bounded", "--out", "one", "--json"],
    "set": [*RUN, "--set", "size=2", "--kind", "steep", "--out", "two", "--json"],
    "again": ["run", "--config", "one/config.toml", "--out", "again", "--json"],
    "resume": ["run", "--resume", "--out", "one", "--steps", "30", "--json"],
    "compare": [
        *("compare", "mine.py:task", "--solvers", "aipod,e3-aipod", "--seeds", "2"),
        *("--steps", "10", "--out", "both", "--json"),
    ],
    "compare on": ["compare", "--resume", "--out", "both", "--seeds", "3", "--json"],
    "report": ["report", "one", "both", "--json"],
    "task": ["run", "mine.py:whole", "--steps", "5", "--out", "whole", "--json"],
    "several": ["run", "mine.py:several", "--steps", "5", "--out", "several", "--json"],
    "module": ["run", "mine:task", "--steps", "5", "--out", "module", "--json"],
    "check": ["check", "mine.py:task", "--set", "size=2", "--json"],
    "check options": ["check", "mine.py:task", "--size", "2", "--json"],
    "new": ["new", "fresh"],
    "new run": ["run", "fresh.py:task", "--steps", "5", "--goods", "3", "--json"],
    "help": ["run", "mine.py:task", "--help"],
}
REFUSED = {
    "no file": (["run", "none.py:task"], "there is no file none.py"),
    "no function": (["run", "mine.py"], "or a function of your own, mine.py:task"),
    "nothing named": (["run", "mine.py:"], "name the function in mine.py too"),
    "not installed": (["run", "needs.py:task"], "imports 'nothing_here', which is not installed"),
    "no name": (["run", "mine.py:tsk"], "Did you mean task?"),
    "not a function": (["run", "mine.py:number"], "must be a function"),
    "no record": (["run", "mine.py:three"], "The record is missing"),
    "nothing recorded": (["run", "mine.py:silent"], "return a number"),
    "no default": (["run", "mine.py:needy"], "give the option size a default"),
    "a taken name": (["run", "mine.py:taken"], "rename the option batch"),
    "check a taken name": (["check", "mine.py:taken"], "mine.py:taken: rename the option batch"),
    "check and set it": (
        ["check", "mine.py:taken", "--set", "batch=3"],
        "aipod: mine.py:taken: rename the option batch",
    ),
    "check unknown option": (["check", "mine.py:task", "--sizes", "3"], "--size"),
    "check wrong value": (["check", "mine.py:task", "--size", "many"], "size must be a whole"),
    "an odd type": (["run", "mine.py:odd"], "must be an int, float, bool, str"),
    "raises": (["run", "mine.py:broken"], "raised ZeroDivisionError"),
    "unknown option": ([*RUN, "--sizes", "3"], "--size"),
    "wrong value": ([*RUN, "--size", "many"], "size must be a whole number"),
    "wrong word": ([*RUN, "--kind", "round"], "kind must be"),
    "raises with options": ([*RUN, "--size", "0", "--out", "zero"], "no entries"),
    "no identifier": (["new", "my task"], "is no name for a Python file"),
    "there already": (["new", "mine"], "mine.py is there already"),
    "changed": (["run", "--resume", "--out", "old"], "has changed since"),
    "changed repeat": (["run", "--config", "old/config.toml"], "has changed since"),
    "gone": (["run", "--resume", "--out", "gone"], "there is no file lost.py"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("own")
    (place / "mine.py").write_text(TASK)
    (place / "needs.py").write_text("import nothing_here\n")
    for name, file in (("old", "mine.py"), ("gone", "lost.py")):
        (place / name).mkdir()
        (place / name / "config.toml").write_text(
            f'experiment = "{file}:task"\ntask_digest = "{"0" * 32}"\n'
        )
    return place


@pytest.fixture(scope="module")
def answers(place):
    lines = [*LINES.values(), *(line for line, _ in REFUSED.values())]
    return dict(zip([*LINES, *REFUSED], answer_all(lines, place), strict=True))


def printed(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_a_run_has_its_options_as_flags(answers, place):
    found = printed(answers["run"])
    assert found["experiment"] == "mine.py:task"
    assert {"size": 4, "bounded": True, "kind": "flat"}.items() <= found["config"].items()
    assert [m["name"] for m in found["metrics"]] == ["loss"]
    assert found["axes"] == ["projections", "step"]
    assert [m["name"] for m in printed(answers["several"])["metrics"]] == ["loss", "bias"]
    config = tomllib.loads((place / "again" / "config.toml").read_text())
    assert len(config["task_digest"]) == 32
    assert (place / "one" / "figures" / "metrics.png").stat().st_size > 1000
    steep = printed(answers["set"])["config"]
    assert (steep["size"], steep["kind"]) == (2, "steep")


def test_a_configuration_repeats_the_run_and_resume_goes_on(answers):
    assert printed(answers["again"])["last"]["loss"] == printed(answers["run"])["last"]["loss"]
    assert printed(answers["resume"])["steps"] == 30


def test_a_comparison_and_its_report(answers, place):
    assert len(printed(answers["compare"])["tables"][0]["rows"]) == 2
    grown = printed(answers["compare on"])["tables"][0]["rows"]
    assert [row["seeds"] for row in grown] == [3, 3]
    page = (place / printed(answers["report"])["report"]).read_text()
    assert "A small problem of my own." in page
    assert str(place) not in page


def test_a_task_may_say_how_it_is_shown(answers):
    assert printed(answers["task"])["metrics"] == [
        {"name": "score", "label": "my score", "log": False, "better": "larger"}
    ]


def test_modules_and_check(answers):
    assert printed(answers["module"])["steps"] == 5
    assert printed(answers["check"])["ok"]
    # An option of the task is an option of the verb, as in `run`.
    by_set, by_option = (printed(answers[name]) for name in ("check", "check options"))
    assert by_set["findings"][0] == by_option["findings"][0]
    assert "2 variables" in by_option["findings"][0]["value"]


def test_the_template_runs_and_the_help_shows_the_flags(answers):
    assert "aipod run fresh.py:task" in answers["new"].out
    assert printed(answers["new run"])["config"]["goods"] == 3
    assert "how many numbers" in answers["help"].out


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_gets_one_sentence(name, answers, place):
    refused(answers[name], REFUSED[name][1])
    assert not (place / "zero").exists()


def test_precision_and_devices_are_settled_before_the_file_is_imported(tmp_path):
    """An array at the top of the file starts JAX."""
    top = TASK.replace("import aipod\n", "import aipod\n\nOFF = jnp.ones(2) / 3\n", 1)
    top = top.replace("jnp.sum((y - 1.0) ** 2)", "jnp.sum((y - OFF.sum()) ** 2)")
    top += "\nassert OFF.dtype == jnp.float64\n"
    (tmp_path / "top.py").write_text(top)
    line = ["run", "top.py:task", "--size", "2", "--steps", "2", "--mesh", "2", "--json"]
    lines = [[*line, "--x64", "--out", "one"], ["run", "--resume", "--out", "one", "--steps", "3"]]
    for one in lines:
        (answer,) = answer_all([one], tmp_path)
        assert answer.code == 0, answer.err
