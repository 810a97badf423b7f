"""Clients on a graph: both tasks of the experiment run, and draw their picture."""

import jax
import numpy as np
import pytest

from aipod.experiments import load
from aipod.experiments.config import resolve
from aipod.experiments.execute import execute, prepare
from aipod.runs._folder import RunFolder


@pytest.mark.parametrize("task", ["hyper-representation", "cleaning"])
def test_the_experiment_runs_and_draws_the_graph(task, tmp_path):
    options = {"clients": 6, "hidden": 6, "task": task, "graph": "ring", "links": 0.9}
    config = resolve({"experiment": "gossip", "steps": 12, "every": 4, **options})
    with jax.numpy_rank_promotion("allow"):
        summary = execute(prepare(config), RunFolder(tmp_path / "run"))
    columns = np.genfromtxt(tmp_path / "run" / "metrics.csv", delimiter=",", names=True)
    assert columns["messages"][-1] == 12 * round(2 * 0.9 * 6)
    assert columns["x_disagreement"][-1] > 0
    assert columns["accuracy"][-1] > 0.15
    assert ("auc" in columns.dtype.names) == (task == "cleaning")
    assert "spectral gap" in summary["picture"]
    assert (tmp_path / "run" / "figures" / "picture.svg").stat().st_size > 10_000


def test_participation_is_that_of_links():
    with pytest.raises(ValueError, match="set links instead"):
        load("gossip").options(participation=0.5)
