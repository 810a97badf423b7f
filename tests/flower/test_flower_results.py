"""What the owner of a run gets: the solution, a run folder, a model file, an app to begin with."""

import importlib
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import flower
from aipod._report.collect import collect
from aipod.cli import main
from aipod.flower._new import write_app
from tests.flower.flower_grid import InProcessGrid, context
from tests.flower.test_flower_hostile import E3


def upper(x, y, batch):
    return jnp.mean((batch @ y["w"][0]) ** 2) + jnp.sum(x**2)


def lower(x, y, batch):
    return jnp.mean((batch @ y["w"][0] - 1) ** 2) + jnp.sum(jnp.exp(x) * y["w"][0] ** 2)


X0, Y0 = jnp.zeros(3), {"w": (jnp.full(3, 0.1),)}


def run(folder, config, *, record=None, on_finish=lambda solution: None, load_client=None):
    def own(context):
        index = int(context.node_config["partition-id"])
        data = np.random.default_rng(index).normal(size=(6, 3))
        return flower.Client(upper, lower, data, data, 3, X0, Y0, index, 2)

    nodes = {
        100 + i: context(
            100 + i, node_config={"partition-id": i, "state-dir": str(folder / "states")}
        )
        for i in range(2)
    }
    client = flower.make_client_app(load_client or own, E3, cache=False)
    start = flower.Start(X0, Y0, record, name="penalties")
    server = flower.make_server_app(E3, lambda context: start, on_finish=on_finish)
    config = {"outer-steps": 3, "wait": 5.0} | config
    server(InProcessGrid(client, nodes), context(0, run=77, run_config=config))


def test_the_owner_of_any_app_gets_a_solution_a_folder_a_report_and_a_model(tmp_path):
    got = []
    run(
        tmp_path,
        {"run-dir": str(tmp_path / "runs" / "{run-id}")},
        record=lambda x, y: {"size": jnp.sum(y["w"][0] ** 2), "accuracy": jnp.ones(())},
        on_finish=got.append,
    )
    (solution,) = got
    assert solution.result.name == "completed"
    assert solution.history["size"].shape == (3,)
    folder = tmp_path / "runs" / "77"
    (section,) = collect([folder])
    (group,) = section.groups
    assert group.runs[0].summary["experiment"] == "penalties"
    assert group.runs[0].summary["result"] == "completed"
    assert {m["name"]: m["better"] for m in group.runs[0].summary["metrics"]} == {
        "size": "smaller",
        "accuracy": "larger",
    }
    assert tomllib.loads((folder / "config.toml").read_text())["steps"] == 3
    assert main(["report", str(folder)]) == 0
    assert "penalties" in (folder / "report.html").read_text()
    for place in (folder, folder / "checkpoint", folder / "model.npz"):
        model = flower.load(place, X0, Y0)
        np.testing.assert_array_equal(model.x, solution.x[0])
        np.testing.assert_array_equal(model.y["w"][0], solution.y["w"][0][0])
        plain = flower.load(place)
        np.testing.assert_array_equal(plain.x, solution.x[0])
        np.testing.assert_array_equal(plain.y["['w'][0]"], solution.y["w"][0][0])
    assert flower.load(folder).history["step"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="give the starting point of that run"):
        flower.load(folder, jnp.zeros(4), Y0)


def test_a_run_without_measurements_has_a_folder_too(tmp_path):
    run(tmp_path, {"run-dir": str(tmp_path / "run"), "outer-steps": 1})
    (section,) = collect([tmp_path / "run"])
    assert section.groups[0].runs[0].summary["metrics"][0]["name"] == "seconds"


def test_the_owner_hears_of_a_run_that_did_not_end_well(tmp_path):
    got = []

    def broken(context):
        raise ValueError("no data")

    with pytest.raises(RuntimeError, match="only 0 of at least"):
        run(tmp_path, {"wait": 0.2}, on_finish=got.append, load_client=broken)
    assert [one.result.name for one in got] == ["interrupted"]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither checkpoints nor a model"):
        flower.load(tmp_path)
    (tmp_path / "model.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="is no checkpoint and no model"):
        flower.load(tmp_path)
    np.savez(tmp_path / "model.npz", z=np.ones(3))
    with pytest.raises(ValueError, match="holds no x"):
        flower.load(tmp_path)


def test_a_new_app_runs_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["federation", "new", "my-app"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "aipod federation up --tls --dir my-app/federation",
        "aipod federation run my-app",
    ]
    project = tomllib.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    monkeypatch.syspath_prepend(tmp_path / "my-app")
    for name in [name for name in sys.modules if name.startswith("my_app")]:
        monkeypatch.delitem(sys.modules, name)
    client, server = (
        getattr(importlib.import_module(place.split(":")[0]), place.split(":")[1])
        for place in (app["components"]["clientapp"], app["components"]["serverapp"])
    )
    node = {"num-partitions": 2, "state-dir": str(tmp_path / "states")}
    contexts = {100 + i: context(100 + i, node_config=node | {"partition-id": i}) for i in range(2)}
    # The node's compiled programs stay out of this process's cache.
    monkeypatch.setattr(aipod.flower._apps, "_keep_programs", lambda folder: None)
    config = app["config"] | {"outer-steps": 2, "run-dir": str(tmp_path / "run")}
    with jax.numpy_rank_promotion("allow"):
        server(InProcessGrid(client, contexts), context(0, run_config=config))
    assert flower.load(tmp_path / "run").y.shape == (3,)
    assert main(["federation", "new", "my-app"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Up", "1st", "a b", "class", "aipod", "x" + "-"])
def test_names_that_python_could_not_import_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of an app"):
        write_app(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_run_needs_a_federation(tmp_path, capsys):
    assert main(["federation", "run", str(tmp_path), "--dir", str(tmp_path / "none")]) == 2
    assert "no federation is running" in capsys.readouterr().err
