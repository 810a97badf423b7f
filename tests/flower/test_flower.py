"""A federation on Flower is the simulation, message for message."""

import dataclasses
import inspect
import io
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

import aipod
from aipod import federated, flower
from aipod._misc.keys import round_key, subkeys
from aipod._report.collect import collect
from aipod.experiments import load
from aipod.experiments.config import read, resolve
from aipod.experiments.execute import Prepared
from aipod.flower import _book, _coordinator
from aipod.flower._combine import combine
from aipod.flower._local import Worker, initial_state
from aipod.flower._mailbox import DIRECTION, LARGEST, POINT, TOTAL
from aipod.flower._parcel import Parcel, from_bytes, to_bytes
from aipod.flower._post import LARGE, from_records, to_records
from aipod.problem import ClientMinibatches
from aipod.sets import Consensus
from aipod.sets._consensus import _SomeClients
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.flower_grid import InProcessGrid, context

CLIENTS, SEED = 3, 7
NODES = [100 + index for index in range(CLIENTS)]


def serve(
    task,
    solver,
    folder,
    config,
    *,
    before=lambda node, message: None,
    record=None,
    run=1,
    privacy=None,
    start=None,
    look=True,
    lie=None,
):
    """Runs both apps on one grid; the grid, and the checkpoint's columns and words.

    `lie(node, message, reply)` is what a node sends in place of its reply.
    """

    def load_client(context):
        return flower.client_of(*task, index=int(context.node_config["partition-id"]))

    def from_task(context):
        x0, y0 = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in task[1:])
        return flower.Start(x0, y0, record)

    contexts = {
        node: context(
            node, run=run, node_config={"partition-id": index, "state-dir": str(folder / "states")}
        )
        for index, node in enumerate(NODES)
    }
    app = flower.make_client_app(load_client, solver, privacy=lambda _: privacy, cache=False)

    def answer(message, context):
        reply = app(message, context)
        return reply if lie is None else lie(context.node_id, message, reply)

    grid = InProcessGrid(answer, contexts, before)
    config = {"seed": SEED, "checkpoint-dir": str(folder / "checkpoints"), "wait": 5} | config
    server = flower.make_server_app(solver, start or from_task)
    error = None
    try:
        server(grid, context(0, run=run, run_config=config))
    except RuntimeError as raised:
        error = raised
    return (grid, *checkpoint(folder), error) if look else error


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
            # E-AiPOD's adjoint has none.
            names = ["state:.lower.correction", "state:.adjoint.correction"]
            found.append([archive[name] for name in names if name in archive.files])
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


SHARED = {
    "upper_lr": 0.01,
    "lower_lr": 0.05,
    "adjoint_lr": 0.05,
    "lower_steps": 3,
    "adjoint_steps": 2,
}
WARM = aipod.Neumann(3, 0.05, warm=True)
SKIPPING = {name: SHARED[name] for name in ("upper_lr", "lower_lr", "adjoint_lr", "lower_steps")}
SOLVERS = {
    "E3-AiPOD": aipod.E3AiPOD(lower_steps=3),
    "E-AiPOD, warm": dataclasses.replace(aipod.EAiPOD(**SHARED), adjoint=WARM),
    "E2-AiPOD, warm": aipod.E2AiPOD(**SKIPPING, lower_prob=0.5, adjoint_prob=0.5),
    "E-AiPOD": aipod.EAiPOD(**SHARED, lower_prob=0.5),
    "SimFBO": aipod.SimFBO(upper_lr=0.02, lower_lr=0.05, adjoint_lr=0.05, local_steps=3),
    "E2-AiPOD": aipod.E2AiPOD(**SHARED, lower_prob=0.5, adjoint_prob=0.5, upper_steps=2),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_the_trajectory_the_rounds_and_the_bytes_are_the_simulation_s(name, digits, tmp_path):
    solver, steps = SOLVERS[name], 3

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


# A small problem in double precision for everything that does not need images: one program for
# all clients and all tests.
E3 = aipod.E3AiPOD(
    upper_optimizer=optax.sgd(0.05, momentum=0.5),
    lower_lr=0.1,
    adjoint_lr=0.1,
    lower_steps=3,
    adjoint_steps=2,
    damping=0.0,
)


def test_the_server_says_of_its_convergence_what_the_simulation_says(ridge, tmp_path, monkeypatch):
    """The numbers travel with the models, also over a restart of the server."""
    said, solution = [], _book.Book.solution

    def listened(book, *arguments):
        said.append(solution(book, *arguments).convergence)
        return solution(book, *arguments)

    monkeypatch.setattr(_book.Book, "solution", listened)
    for steps in (12, 24):
        config = {"outer-steps": steps, "every": 6, "resume-from": str(tmp_path / "checkpoints")}
        serve(ridge, E3, tmp_path, config if steps > 12 else {"outer-steps": 12, "every": 6})
        simulated = aipod.solve(
            *(ridge[0], E3, *ridge[1:], steps), key=jax.random.key(SEED)
        ).convergence
        assert said[-1].stationarity == pytest.approx(simulated.stationarity, rel=1e-6)
        assert simulated.stationarity > 0
        for name in ("converged", "reason", "advice", "window", "convex"):
            assert getattr(said[-1], name) == getattr(simulated, name)


@pytest.mark.parametrize("make", [aipod.FedNest, aipod.FedAvg])
def test_the_federated_rivals_run_too(ridge, tmp_path, make):
    """The table of exchanges has them; FedAvg sends what it counts as two rounds at once."""
    known = {"upper_lr": 0.05, "lower_lr": 0.1, "adjoint_lr": 0.1, "lower_steps": 1}
    known |= {"adjoint_steps": 1}
    solver = make(**{k: v for k, v in known.items() if k in inspect.signature(make).parameters})
    simulated = aipod.solve(
        *(ridge[0], solver, *ridge[1:], 2), key=jax.random.key(SEED), record=both, every=1
    )
    _, columns, words, error = serve(ridge, solver, tmp_path, {"outer-steps": 2}, record=both)
    assert error is None
    np.testing.assert_allclose(columns["history:x"], simulated.history["x"], atol=1e-12)
    expected = {aipod.FedAvg: 2, aipod.FedNest: simulated.ledger.rounds + 2}
    assert words["progress"]["rounds"] == expected[make]


class Scripted(Consensus):
    """Consensus in which one client is absent in the rounds of some keys."""

    gone: jax.Array
    absent: int = eqx.field(static=True)

    def __init__(self, weights, gone, absent):
        super().__init__(weights)
        self.gone, self.absent = gone, absent

    def for_round(self, key):
        return ScriptedRound(self, key)

    def once(self, clients):
        return None


class ScriptedRound(_SomeClients):
    def _present(self, clients):
        away = jnp.any(jnp.all(self.base.gone == jax.random.key_data(self.key), axis=1))
        return jnp.ones(clients).at[self.base.absent].set(jnp.where(away, 0.0, 1.0))


def upper_key(step):
    """The key of E3-AiPOD's one round."""
    key = subkeys(jax.random.fold_in(jax.random.key(SEED), step), 6)[2]
    return jax.random.key_data(round_key(key, 0))


def both(x, y):
    return {"x": federated.average(x, None), "y": federated.average(y, None)}


@pytest.fixture
def eager(monkeypatch):
    """Clients that come back are seen at once, so that a test says when that is."""
    monkeypatch.setattr(_coordinator, "_LOOK", 0.0)


def test_a_round_without_a_client_is_the_simulation_s(ridge, tmp_path, eager):
    """Points by the weights of those present, directions unbiased, corrections of the absent kept.

    Client 1 fails when it should compute its part of step 2, and is back for step 3.
    """
    problem, x0, y0 = ridge
    steps, absent = 6, 1
    gone = jnp.stack([upper_key(2)])
    scripted = Scripted(problem.lower_set.weights, gone, absent)
    reference = aipod.solve(
        eqx.tree_at(lambda p: (p.upper_set, p.lower_set), problem, (scripted, scripted)),
        E3,
        x0,
        y0,
        steps,
        key=jax.random.key(SEED),
        record=both,
        every=1,
    )
    exchanges = []

    def before(node, message):
        if message.metadata.message_type == "train.exchange" and node == NODES[absent]:
            exchanges.append(node)
            if len(exchanges) == 3:
                raise RuntimeError("killed")

    _, columns, words, error = serve(
        ridge, E3, tmp_path, {"outer-steps": steps, "min-nodes": 2}, before=before, record=both
    )
    assert error is None
    np.testing.assert_allclose(columns["history:x"], reference.history["x"], atol=1e-12)
    np.testing.assert_allclose(columns["history:y"], reference.history["y"], atol=1e-12)
    assert words["progress"]["rounds"] == steps
    # With everyone the run would have been another one.
    whole = aipod.solve(problem, E3, x0, y0, steps, key=jax.random.key(SEED))
    assert np.abs(whole.x[0] - columns["history:x"][-1]).max() > 1e-6
    weights = np.array([1.0, 2.0, 3.0]) / 6
    for part in corrections(tmp_path):
        assert np.abs(part).max() > 1e-2
        np.testing.assert_allclose(np.tensordot(weights, part, 1), 0, atol=1e-12)


def test_a_client_that_lost_its_state_makes_all_corrections_begin_anew(ridge, tmp_path, eager):
    seen = []

    def before(node, message):
        if message.metadata.message_type == "train.exchange" and node == NODES[0]:
            seen.append(from_records(message.content).words)
            if len(seen) == 4:
                for folder in (tmp_path / "states").glob("*/client-0"):
                    shutil.rmtree(folder)

    _, columns, _, error = serve(
        ridge, E3, tmp_path, {"outer-steps": 8, "min-nodes": 2}, before=before, record=both
    )
    assert error is None
    assert columns["history:step"].tolist() == list(range(1, 9))
    # At the start, and when it came back: nothing else begins anew.
    assert [bool(said.get("reset")) for said in seen].count(True) == 2
    weights = np.array([1.0, 2.0, 3.0]) / 6
    for part in corrections(tmp_path):
        assert np.abs(part).max() > 1e-2
        np.testing.assert_allclose(np.tensordot(weights, part, 1), 0, atol=1e-12)


class Killed(BaseException):
    """The server's process ends in the midst of it."""


def killed_at(at):
    """For `serve`: the process ends before this message leaves, counted from 1."""
    messages = []

    def before(node, message):
        messages.append(node)
        if len(messages) == at:
            raise Killed

    return before


def test_a_client_that_loses_its_state_again_and_again_is_refused(ridge, tmp_path, eager):
    """Each time corrections begin anew; without them the others would go astray."""
    resets = []

    def before(node, message):
        if message.metadata.message_type == "train.exchange":
            words = from_records(message.content).words
            if node == NODES[0] and words["step"] >= 0:
                for folder in (tmp_path / "states").glob("*/client-0"):
                    shutil.rmtree(folder)
            elif node == NODES[1] and words.get("reset"):
                resets.append(words["step"])

    _, columns, _, error = serve(
        ridge, E3, tmp_path, {"outer-steps": 14, "min-nodes": 2}, before=before, record=both
    )
    assert error is None
    # At the start, and three times for the client that loses its state.
    assert len(resets) == 4
    assert columns["history:step"].tolist() == list(range(1, 15))


@pytest.mark.parametrize("at", [5, 11])
def test_a_killed_server_goes_on_bit_for_bit(ridge, tmp_path, at):
    whole = serve(ridge, E3, tmp_path / "whole", {"outer-steps": 4}, record=both)[1]
    with pytest.raises(Killed):
        serve(ridge, E3, tmp_path / "cut", {"outer-steps": 4}, before=killed_at(at), record=both)
    resume = {"outer-steps": 4}
    saved = any((tmp_path / "cut" / "checkpoints").glob("*.npz"))
    # The first three messages are greetings; answers are written down before they leave.
    assert saved == (at > 6)
    if saved:
        resume["resume-from"] = str(tmp_path / "cut" / "checkpoints")
    _, columns, _, error = serve(ridge, E3, tmp_path / "cut", resume, record=both, run=2)
    assert error is None
    for name in ("history:x", "history:y", "history:rounds", "history:samples"):
        np.testing.assert_array_equal(columns[name], whole[name])


def test_with_too_few_clients_it_stops_with_everything_saved(ridge, tmp_path, eager):
    def before(node, message):
        if node == NODES[2] and len(grids) and message.metadata.message_type == "train.exchange":
            raise RuntimeError("gone")

    grids = []
    _, columns, _, error = serve(ridge, E3, tmp_path, {"outer-steps": 2, "wait": 0.3}, record=both)
    assert error is None
    grids.append(1)
    config = {"outer-steps": 4, "wait": 0.3, "resume-from": str(tmp_path / "checkpoints")}
    _, columns, _, error = serve(ridge, E3, tmp_path, config, before=before, run=2, record=both)
    assert "only 2 of at least 3 clients" in str(error)
    assert "resume-from" in str(error)
    grids.clear()
    _, columns, _, error = serve(ridge, E3, tmp_path, config, run=3, record=both)
    assert error is None
    assert columns["history:step"].tolist() == [1, 2, 3, 4]


def test_a_client_draws_what_the_simulation_draws_for_it():
    data = client_data(4, lambda m: 5 + 3 * m)
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=7)
    zeros = jnp.zeros((4, 3))
    key = jax.random.key(3)
    drawn = problem.lower_samples(key)
    assert isinstance(problem.lower_samples, ClientMinibatches)
    for index in range(4):
        alone = flower.client_of(problem, zeros, zeros, index).problem()
        own = alone.lower_samples(key)
        for mine, all_of_them in zip(own.data, drawn.data, strict=True):
            np.testing.assert_array_equal(mine[0], all_of_them[index])
        assert alone.lower_samples.size == problem.lower_samples.size


def test_answers_are_those_of_a_round_with_absent_clients():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(5, 4)), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    present = np.array([0, 2, 3])
    asked = {
        int(m): {
            f"y.0.{POINT}": values[m],
            f"x.0.{DIRECTION}": values[m],
            f"number.0.{LARGEST}": values[m],
            f"number.1.{TOTAL}": values[m],
        }
        for m in present
    }
    found = combine(asked, dict(enumerate(weights)), clients=5)
    shares = weights[present] / weights.sum()
    np.testing.assert_allclose(found["y.0"], shares @ values[present] / shares.sum(), rtol=1e-14)
    np.testing.assert_allclose(found["x.0"], shares @ values[present] * 5 / 3, rtol=1e-14)
    np.testing.assert_allclose(found["number.0"], values[present].max(axis=0))
    np.testing.assert_allclose(found["number.1"], values[present].sum(axis=0))


def test_clients_that_ask_for_different_things_are_told():
    asked = {0: {f"y.0.{POINT}": np.ones(2)}, 1: {f"y.1.{POINT}": np.ones(2)}}
    with pytest.raises(ValueError, match="the same solver and the same versions"):
        combine(asked, {0: 1.0, 1: 1.0}, clients=2)


def test_parcels_come_through_flower_unchanged():
    arrays = {
        "answer:y.0": np.arange(5, dtype=np.float32),
        "shared:3": np.array(7, np.int32),
        "model@2:x0": np.arange(6.0).reshape(2, 1, 3),
        "empty:0": np.zeros((0, 3)),
    }
    large = {"answer:x.0": np.arange(LARGE // 8 + 1, dtype=np.float64)}
    for content in ({}, arrays, large):
        parcel = Parcel({"run": "a", "turn": 3, "pause": True}, content)
        records = to_records(parcel)
        assert bool(records.array_records) == (content is large)
        found = from_records(records)
        assert found.words == parcel.words
        assert list(found.arrays) == list(content)
        for name, value in content.items():
            assert found.arrays[name].dtype == value.dtype
            np.testing.assert_array_equal(found.arrays[name], value)


class Trap:
    """Would run code if anybody unpickled it."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_nothing_is_unpickled_and_nonsense_is_refused():
    trap = np.array([Trap()], dtype=object)
    file = io.BytesIO()
    np.save(file, trap, allow_pickle=True)
    array = Array("object", (1,), "numpy.ndarray", file.getvalue())
    record = RecordDict({"a": ArrayRecord({"b": array}), "w": ConfigRecord({"a": ["x object 1"]})})
    with pytest.raises(ValueError, match="allow_pickle"):
        from_records(record)
    with pytest.raises(ValueError, match="none of aipod's"):
        from_records(RecordDict({}))
    lines, buffer = to_bytes({"x": np.arange(4.0)})
    for wrong in (["x object 4"], ["x float64 5"], ["x float64 3"], ["x float64 -4"]):
        with pytest.raises(ValueError, match="a message"):
            from_bytes(wrong, buffer)
    assert lines == ["x float64 4"]


def test_a_client_with_another_solver_is_refused(ridge, tmp_path, eager):
    def load_client(context):
        return flower.client_of(*ridge, index=int(context.node_config["partition-id"]))

    other = aipod.E3AiPOD(upper_lr=0.05, lower_lr=0.2, adjoint_lr=0.1, damping=0.0)
    apps = [flower.make_client_app(load_client, s, cache=False) for s in (E3, other)]
    config = {"state-dir": str(tmp_path)}
    contexts = {
        node: context(node, node_config=config | {"partition-id": index})
        for index, node in enumerate(NODES)
    }
    grid = InProcessGrid(
        lambda message, context: apps[context.node_id == NODES[1]](message, context), contexts
    )
    server = flower.make_server_app(E3, lambda context: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(RuntimeError, match=r"only 2 of at least 3 .*has other arguments"):
        server(grid, context(0, run_config={"outer-steps": 1, "wait": 0.5}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lacks outer-steps"),
        ({"outer-steps": 1.5}, "outer-steps must be a whole number"),
        ({"outer-steps": 0}, "steps must be at least 1"),
        ({"outer-steps": 1, "round-timeout": 0}, "round_timeout must be positive"),
        ({"outer-steps": 1, "min-nodes": -1}, "min_nodes must be at least 1"),
        ({"outer-steps": 1, "resume-from": "nowhere"}, "neither a run nor checkpoints"),
    ],
)
def test_bad_settings_are_told_before_anything_is_sent(config, message):
    server = flower.make_server_app(E3, lambda context: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(ValueError, match=message):
        server(InProcessGrid(None, {}), context(0, run_config=config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 3}, "below clients, which is 3"),
        ({"index": 0.5}, "index must be a whole number"),
        ({"weight": 0.0}, "weight must be positive"),
    ],
)
def test_bad_clients_are_told(ridge, change, message):
    client = flower.client_of(*ridge, index=0)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(client, **change)


def test_clients_of_data_on_the_host_are_refused():
    data = client_data(2, 4)
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=2, on_host=True)
    zeros = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="leave on_host out"):
        flower.client_of(problem, zeros, zeros, index=0)


def test_solvers_that_average_elsewhere_are_refused(ridge):
    start = [leaf[0] for leaf in ridge[1:]]
    solver = aipod.Alternating(
        aipod.ProxSkip(0.1), aipod.ConjugateGradient(), aipod.EveryStep(lr=0.1)
    )
    state = initial_state(solver, *start)
    worker = Worker(solver, flower.client_of(*ridge, index=0).problem(), state)
    with pytest.raises(ValueError, match="averages outside of its rounds"):
        worker.attempt(state, jax.random.key(0), worker.no_answers())


def test_noise_hides_a_client_and_there_are_no_corrections(ridge, tmp_path):
    privacy = flower.Privacy(clip=0.05, noise=0.3)
    _, columns, _, error = serve(
        ridge, E3, tmp_path, {"outer-steps": 6}, record=both, privacy=privacy
    )
    assert error is None
    plain = serve(ridge, E3, tmp_path / "plain", {"outer-steps": 6}, record=both)[1]
    gap = np.abs(columns["history:y"][-1] - plain["history:y"][-1]).max()
    assert 1e-3 < gap < 1.0
    for part in corrections(tmp_path):
        assert not part.any()
    accounts = sorted((tmp_path / "states" / ".privacy").glob("client-*.json"))
    assert [json.loads(path.read_text())["releases"] for path in accounts] == [6] * CLIENTS


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (aipod.E3AiPOD(damping=0.0), "find the pace of x"),
        (aipod.E3AiPOD(upper_lr=0.1, damping=0.0), "numbers for lower_lr"),
        (aipod.E3AiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1), "damping"),
        (aipod.EAiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1), "E3AiPOD alone"),
    ],
)
def test_privacy_that_would_not_cover_everything_is_refused(solver, message):
    with pytest.raises(ValueError, match=message):
        flower.Privacy(clip=1.0, noise=1.0).check(solver)


def test_a_client_that_fails_within_a_step_of_many_rounds_comes_back_at_the_next(
    ridge, tmp_path, eager
):
    """It is told which of the step's averages it was counted in: else corrections would be off."""
    solver = aipod.EAiPOD(
        upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, lower_steps=4, lower_prob=0.7, adjoint_steps=2
    )
    calls, flags = [], []

    def before(node, message):
        if message.metadata.message_type == "train.exchange" and node == NODES[1]:
            words = from_records(message.content).words
            calls.append(words["step"])
            flags.append(bool(words.get("leave")))
            # In the third outer step, after it was counted in one average of it.
            if calls.count(2) == 2 and not any(flags):
                raise RuntimeError("killed")

    _, columns, words, error = serve(
        ridge, solver, tmp_path, {"outer-steps": 6, "min-nodes": 2}, before=before, record=both
    )
    assert error is None
    assert flags.count(True) == 1
    assert columns["history:step"].tolist() == list(range(1, 7))
    assert words["progress"]["owed"] == []
    weights = np.array([1.0, 2.0, 3.0]) / 6
    part = corrections(tmp_path)[0]
    assert np.abs(part).max() > 1e-2
    np.testing.assert_allclose(np.tensordot(weights, part, 1), 0, atol=1e-12)
    assert np.isfinite(columns["history:x"]).all()


def test_a_run_folder_is_that_of_aipod_run(digits, tmp_path):
    """Also `aipod report` shows it; without Flower it would be the same run of the experiment."""
    config = resolve(
        {"experiment": "hyper-representation", "steps": 2, "every": 1, "clients": 1, "seed": SEED}
    )
    experiment = load("hyper-representation")
    task = experiment.build(experiment.options(**config.options))
    solver = SOLVERS["E3-AiPOD"]

    def start(context):
        x0, y0 = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in digits[1:])
        return flower.Start(x0, y0, task.record, Prepared(config, experiment, task, solver))

    folder = tmp_path / "run"
    steps = {"outer-steps": 2, "run-dir": str(folder)}
    serve(digits, solver, tmp_path, steps | {"checkpoint-dir": ""}, start=start, look=False)
    (section,) = collect([folder])
    (group,) = section.groups
    run = group.runs[0]
    assert run.summary["result"] == "completed"
    assert run.summary["config"]["clients"] == CLIENTS
    assert run.columns["rounds"].tolist() == [1, 2]
    assert 0 < run.columns["accuracy"][-1] <= 1
    assert read(folder / "config.toml")["clients"] == CLIENTS
