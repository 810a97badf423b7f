"""Clients that lie in well-formed numbers: cuts, robust averages, and who may be which client."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import federated, flower
from aipod.flower import _coordinator
from aipod.flower._averages import Cuts, average_of
from aipod.sets import ClippedMean, GeometricMedian, RobustConsensus, TrimmedMean
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.flower_grid import InProcessGrid, context
from tests.flower.test_flower import checkpoint
from tests.flower.test_flower_hostile import (
    E3,
    asked,
    both,
    changed,
    is_exchange,
    log,
    serve,
)

__all__ = ["log"]
CLIENTS = 5


@pytest.fixture(scope="module", autouse=True)
def _eager():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_coordinator, "_LOOK", 0.0)
        yield


def task_of(data):
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=None)
    return problem, *(federated.replicate(jnp.full(3, v), len(data)) for v in (0.3, -0.2))


@pytest.fixture(scope="module")
def five():
    return task_of(client_data(CLIENTS, 6))


def robust(task, average):
    agreement = RobustConsensus(average)
    return dataclasses.replace(task[0], upper_set=agreement, lower_set=agreement), *task[1:]


def simulated(task, steps):
    return aipod.solve(
        task[0], E3, *task[1:], steps, key=jax.random.key(7), record=both, every=1
    ).history


def flipped(node, message, reply):
    """One client in five sends everything times -10, and a false model."""
    if node != 101 or not is_exchange(message):
        return reply
    lied = changed(message, reply, asked(lambda name, old: (name, -10 * old)))

    def false(parcel):
        arrays = {
            k: v + 5.0 if k.startswith("model@") and v.dtype.kind == "f" else v
            for k, v in parcel.arrays.items()
        }
        return dataclasses.replace(parcel, arrays=arrays)

    return changed(message, lied, false)


@pytest.mark.parametrize(
    ("text", "average"),
    [("trimmed-mean:0.2", TrimmedMean(0.2)), ("geometric-median", GeometricMedian())],
)
def test_a_robust_average_is_the_simulation_s(five, tmp_path, log, text, average):
    config = {"outer-steps": 4, "average": text, "cut": 1e9}
    assert serve(five, tmp_path, config, indices=range(CLIENTS)) is None
    wanted = simulated(robust(five, average), 4)
    found = checkpoint(tmp_path)[0]
    np.testing.assert_allclose(found["history:x"], wanted["x"], atol=1e-12)
    np.testing.assert_allclose(found["history:y"], wanted["y"], atol=1e-12)


def test_a_liar_is_averaged_away_within_the_bound(five, tmp_path, log):
    """The stated bound: every entry of an average lies between values of honest clients."""
    steps = 15
    config = {"outer-steps": steps, "every": 5}
    for name, more in (("mean", {"cut": 1e9}), ("robust", {"average": "trimmed-mean:0.2"})):
        serve(five, tmp_path / name, config | more, indices=range(CLIENTS), lie=flipped)
    honest = simulated(
        task_of([one for m, one in enumerate(client_data(CLIENTS, 6)) if m != 1]), 60
    )
    found = checkpoint(tmp_path / "robust")[0]
    gap = np.linalg.norm(found["history:y"][-1] - honest["y"][-1])
    # Each honest client alone would end here; the robust run stays among them.
    ends = [simulated(task_of([one]), steps)["y"][-1] for one in client_data(CLIENTS, 6)]
    reach = max(np.linalg.norm(end - honest["y"][-1]) for end in ends)
    assert gap < reach
    carried = checkpoint(tmp_path / "mean")[0]
    assert not np.linalg.norm(carried["history:y"][-1] - honest["y"][-1]) < 3 * gap


def test_a_false_model_does_not_change_what_is_recorded(five, tmp_path, log):
    def lie(node, message, reply):
        if node != 101 or not is_exchange(message):
            return reply

        def false(parcel):
            arrays = {k: v + 9 if ":x" in k or ":y" in k else v for k, v in parcel.arrays.items()}
            models = {k: v for k, v in arrays.items() if k.startswith("model@")}
            return dataclasses.replace(parcel, arrays={**parcel.arrays, **models})

        return changed(message, reply, false)

    assert serve(five, tmp_path, {"outer-steps": 3}, indices=range(CLIENTS), lie=lie) is None
    wanted = simulated(five, 3)
    np.testing.assert_allclose(checkpoint(tmp_path)[0]["history:x"], wanted["x"], atol=1e-12)


def test_values_far_from_the_others_are_cut_and_the_bound_follows_the_history():
    lines = []
    cut = Cuts(10.0, lines.append)
    rng = np.random.default_rng(0)

    def asked_of(scale, far):
        values = {m: {"y.0.1": rng.normal(size=3) * scale} for m in range(4)}
        values[4] = {"y.0.1": np.full(3, far)}
        return values

    for scale, far in ((1.0, 1e9), (0.1, 1e9), (0.1, 1e-2)):
        given = asked_of(scale, far)
        found = cut(given)
        middle = np.median([v["y.0.1"] for v in given.values()], axis=0)
        for index in range(4):
            np.testing.assert_array_equal(found[index]["y.0.1"], given[index]["y.0.1"])
        assert np.linalg.norm(found[4]["y.0.1"] - middle) < 40 * max(scale, 0.5)
    assert len(lines) == 2
    assert "client 4: its y.0.1 is" in lines[0]
    # Of three nobody can say who is far from the others.
    three = {m: {"y.0.1": np.full(3, 10.0 ** (9 * m))} for m in range(3)}
    assert cut(three) == {m: {"y.0.1": three[m]["y.0.1"]} for m in three}


def test_honest_clients_are_never_cut(five, tmp_path, log):
    assert serve(five, tmp_path, {"outer-steps": 6}, indices=range(CLIENTS)) is None
    assert not any("was cut" in line for line in log)


def test_an_index_belongs_to_the_node_that_the_configuration_names(five, tmp_path, log):
    """Node 104 claims to be client 0 before the right one can, and 105 is nobody."""
    order = [4, 0, 1, 2, 3, 0]
    nodes = "101, 102, 103, 104, 100"
    config = {"outer-steps": 2, "nodes": nodes}
    assert serve(five, tmp_path, config, indices=order) is None
    assert any("node 105 is refused: the run configuration's nodes do not" in line for line in log)
    wrong = {"outer-steps": 1, "nodes": "100, 101, 102, 103, 104", "wait": 0.3}
    error = serve(five, tmp_path / "wrong", wrong, indices=order)
    assert "it claims to be client 4, and is 0 in the run configuration" in str(error)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"average": "median"}, "average must be mean, trimmed-mean"),
        ({"average": "trimmed-mean:0.7"}, "share must be in"),
        ({"average": "trimmed-mean:x"}, "could not convert"),
        ({"average": "geometric-median:3"}, "average must be"),
        ({"cut": 0.5}, "cut must be at least 1"),
        ({"nodes": "1, 1"}, "nodes must be different"),
        ({"nodes": "1, a"}, "nodes must be numbers"),
        ({"nodes": "1, 2", "clients": 3}, "2 nodes for 3 clients"),
    ],
)
def test_bad_settings_are_told(config, message):
    server = flower.make_server_app(E3, lambda context: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(ValueError, match=message):
        server(InProcessGrid(None, {}), context(0, run_config={"outer-steps": 1} | config))


def test_averages_have_names():
    assert average_of("") is None
    assert average_of("mean") is None
    assert average_of("trimmed-mean") == TrimmedMean()
    assert average_of("clipped-mean:2") == ClippedMean(2.0)
