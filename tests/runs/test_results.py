"""A run folder's results, from nothing but a solution and a description of the run."""

import ast
import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod._report.collect import collect
from aipod.experiments.config import resolve
from aipod.experiments.execute import prepare
from aipod.runs import _environment
from aipod.runs._description import Description, Drawing
from aipod.runs._folder import RunFolder
from aipod.runs._results import write_results

METRIC = {"name": "size", "label": "size of y", "log": True, "better": "smaller"}


@pytest.fixture(scope="module")
def solution():
    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(y**2), lambda x, y, _: jnp.sum((x - y) ** 2))
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.2)
    return aipod.solve(
        *(problem, solver, jnp.ones(2), jnp.ones(2), 3),
        key=jax.random.key(0),
        record=lambda x, y: {"size": jnp.sum(y**2), "accuracy": jnp.asarray(0.86)},
        every=1,
    )


def description(**more):
    config = {"experiment": "mine", "solver": "aipod", "seed": 5, "upper_lr": 0.1}
    return Description(
        *("mine", "aipod", 5, "upper_lr = 0.1\n", config, {"upper_lr": 0.1}, [METRIC], ["step"]),
        **more,
    )


def test_a_report_can_be_made_of_what_was_described(solution, tmp_path):
    drawn = []
    picture = Drawing(
        lambda x, y, folder, columns: drawn.append((x, y, folder)), "What there is to see."
    )
    run = description(derive=lambda columns: {"half": columns["size"] / 2}, picture=picture)
    folder = RunFolder(tmp_path)
    folder.create(run.toml)
    summary = write_results(run, folder, solution, "today")
    assert folder.read_summary() == summary
    said = summary["convergence"]
    assert said["converged"] is solution.converged
    assert said["stationarity"] == solution.convergence.stationarity
    assert said["reason"] == solution.convergence.reason
    assert summary["last"]["half"] == summary["last"]["size"] / 2
    assert summary["first"]["0.85"] == {"step": 1}
    assert summary["first"]["0.90"] is None
    assert summary["picture"] == picture.caption
    ((x, _, place),) = drawn
    np.testing.assert_array_equal(x, solution.x)
    assert place == folder.figures
    (section,) = collect([tmp_path])
    assert section.groups[0].runs[0].columns["size"].shape == (3,)
    assert run.describe(clients=7) is run


def test_a_prepared_experiment_describes_itself():
    config = resolve({"experiment": "hyper-representation", "clients": 2, "steps": 1, "hidden": 3})
    prepared = prepare(config)
    run = prepared.describe()
    assert run.toml == config.toml()
    assert run.config == config.flat()
    assert run.arguments == config.arguments
    # A federation on Flower learns how many clients it has.
    other = prepared.describe(clients=9)
    assert other.config["clients"] == 9
    assert "clients = 9" in other.toml
    assert {k: v for k, v in other.config.items() if run.config[k] != v} == {"clients": 9}


def test_an_environment_without_a_package_says_so(monkeypatch):
    def version(name):
        if name == "optax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(_environment.importlib.metadata, "version", version)
    found = _environment.environment()
    assert (found["aipod"], found["jax"]) == (aipod.__version__, "1.2")
    assert found["optax"] == "not installed"


def test_rooms_above_do_not_know_the_rooms_below():
    """Neither at the top of a file nor inside a function."""
    root = Path(aipod.__file__).parent
    for room, below in {
        "runs": ("flower", "experiments", "report", "cli"),
        "flower": ("experiments", "report", "cli"),
        "experiments": ("report", "cli"),
    }.items():
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    parts = name.split(".")
                    assert parts[0] != "aipod" or not set(parts[1:2]) & set(below), (path, name)
