"""A federation on Flower is the simulation, message for message."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")


import aipod
from aipod import federated, flower
from aipod.experiments import load
from tests.flower_grid import InProcessGrid, context

CLIENTS, SEED = 3, 7
NODES = [100 + index for index in range(CLIENTS)]


def serve(task, solver, folder, config, *, before=lambda node, message: None, record=None, run=1):
    """Runs both apps on one grid; the grid, and the checkpoint's columns and words."""

    def load_client(context):
        return flower.client_of(*task, index=int(context.node_config["partition-id"]))

    def start(context):
        x0, y0 = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in task[1:])
        return flower.Start(x0, y0, record)

    contexts = {
        node: context(
            node, run=run, node_config={"partition-id": index, "state-dir": str(folder / "states")}
        )
        for index, node in enumerate(NODES)
    }
    grid = InProcessGrid(flower.make_client_app(load_client, solver, cache=False), contexts, before)
    config = {"seed": SEED, "checkpoint-dir": str(folder / "checkpoints"), "wait": 5} | config
    server = flower.make_server_app(solver, start)
    error = None
    try:
        server(grid, context(0, run=run, run_config=config))
    except RuntimeError as raised:
        error = raised
    return grid, *checkpoint(folder), error


def checkpoint(folder):
    with np.load(max((folder / "checkpoints").glob("*.npz")), allow_pickle=False) as archive:
        columns = {name.removeprefix("column:"): archive[name] for name in archive.files}
    return columns, json.loads(columns["header"].tobytes())["extra"]


def corrections(folder):
    """Each client's r and e as it left them on disk."""
    found = []
    for index in range(CLIENTS):
        newest = max((folder / "states").glob(f"*/client-{index}/*.npz"))
        with np.load(newest, allow_pickle=False) as archive:
            found.append([archive[f"state:{leaf:05d}"] for leaf in (2, 4)])
    return [np.stack(part) for part in zip(*found, strict=True)]


@pytest.fixture(autouse=True)
def _broadcasting():
    """As the experiments have it: a layer adds its bias to a batch."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def digits():
    """The paper's task with three clients, in single precision as people run it."""
    experiment = load("hyper-representation")
    task = experiment.build(experiment.options(clients=CLIENTS))

    def single(tree):
        return jax.tree.map(
            lambda v: v.astype(jnp.float32) if jnp.issubdtype(v.dtype, jnp.floating) else v, tree
        )

    arrays, functions = eqx.partition(task.problem, eqx.is_array)
    return eqx.combine(single(arrays), functions), single(task.x0), single(task.y0)


SHARED = {"upper_lr": 0.01, "lower_lr": 0.05, "lower_steps": 4, "adjoint_steps": 2}
SOLVERS = {
    "E3-AiPOD": aipod.E3AiPOD(lower_steps=4),
    "E-AiPOD": aipod.EAiPOD(**SHARED, lower_prob=0.5),
    "E2-AiPOD": aipod.E2AiPOD(**SHARED, lower_prob=0.5, adjoint_prob=0.5, upper_steps=2),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_the_trajectory_the_rounds_and_the_bytes_are_the_simulation_s(name, digits, tmp_path):
    solver, steps = SOLVERS[name], 4

    def record(x, y):
        return {"x": federated.average(x)[0], "y": federated.average(y)[0]}

    simulated = aipod.solve(
        *(digits[0], solver, *digits[1:], steps),
        key=jax.random.key(SEED),
        record=record,
        every=1,
    )
    grid, columns, words, error = serve(
        digits, solver, tmp_path, {"outer-steps": steps, "every": 1}, record=record
    )
    assert error is None
    for part in ("x", "y"):
        assert columns[f"history:{part}"].dtype == np.float32
        np.testing.assert_allclose(
            columns[f"history:{part}"], simulated.history[part], atol=1e-5, rtol=0
        )
    # Exchanges that carry vectors are the rounds; the curvature of the first step, a number that
    # all step sizes need, takes one exchange more.
    assert words["progress"]["rounds"] == simulated.ledger.rounds
    assert words["progress"]["exchange"] - words["progress"]["rounds"] == (name == "E3-AiPOD")
    if name == "E3-AiPOD":
        assert words["progress"]["rounds"] == steps
    for total in ("rounds", "bytes_up", "bytes_down", "samples", "lower_projections"):
        assert columns[f"history:{total}"].tolist() == simulated.history[total].tolist()
    up, down = (columns[f"history:wire_{way}"][-1] for way in ("up", "down"))
    assert simulated.ledger.bytes_up < up < 1.05 * simulated.ledger.bytes_up
    assert simulated.ledger.bytes_down < down < 1.05 * simulated.ledger.bytes_down
    # What the post counted is what the grid saw, but for models and states.
    kinds = ("train.exchange", "reply")
    seen = sum(size for kind, _, size in grid.bytes if kind in kinds)
    counted = sum(words["traffic"])
    assert 0 <= seen - counted < 1e-2 * seen
