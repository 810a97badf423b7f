"""Clients on Flower that visit their data by epochs: what the simulation computes."""

import dataclasses
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import federated, flower
from aipod.flower import _coordinator
from aipod.flower._draws import Trail, with_first_draws
from aipod.flower._local import initial_state
from aipod.flower._post import from_records
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.test_flower import (
    CLIENTS,
    E3,
    NODES,
    SEED,
    Killed,
    Scripted,
    _broadcasting,  # noqa: F401
    both,
    killed_at,
    serve,
    upper_key,
)


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(_coordinator, "_LOOK", 0.0)


WEIGHTS = [1.0, 2.0, 3.0]
E2 = aipod.E2AiPOD(
    upper_lr=0.01,
    lower_lr=0.05,
    adjoint_lr=0.05,
    lower_steps=2,
    adjoint_steps=1,
    lower_prob=0.3,
    adjoint_prob=0.3,
    upper_steps=3,
)


@pytest.fixture(scope="module")
def ridge():
    """Three clients with 7, 5 and 5 examples, which draw two at a time and by epochs."""
    data = client_data(CLIENTS, lambda m: 5 if m else 7)
    problem = federated.federate(
        ridge_upper, ridge_lower, data, data, batch_size=2, weights=WEIGHTS, epochs=True
    )
    return problem, *(federated.replicate(jnp.full(3, v), CLIENTS) for v in (0.3, -0.2))


def simulated(task, solver, steps):
    key = jax.random.key(SEED)
    return aipod.solve(task[0], solver, *task[1:], steps, key=key, record=both, every=1)


def draws(folder, name="gradient"):
    """How often each client has asked for a derivative, as its disk says."""
    found = []
    for index in range(CLIENTS):
        states = (folder / "states").glob(f"*/client-{index}/*.npz")
        newest = max(states, key=lambda path: path.stat().st_mtime_ns)
        with np.load(newest, allow_pickle=False) as archive:
            (place,) = (n for n in archive.files if n.endswith(f"['{name}'].count"))
            found.append(int(archive[place][0]))
    return found


@pytest.mark.parametrize("solver", [E3, E2], ids=["E3-AiPOD", "E2-AiPOD"])
def test_the_trajectory_is_the_simulation_s(ridge, solver, tmp_path):
    expected = simulated(ridge, solver, 7)
    _, columns, _, error = serve(ridge, solver, tmp_path, {"outer-steps": 7}, record=both)
    assert error is None
    # Between its projections each of E2-AiPOD's clients has an x of its own.
    rows = slice(0, None, 3) if solver is E2 else slice(None)
    np.testing.assert_allclose(columns["history:x"][rows], expected.history["x"][rows], atol=1e-12)
    for name in ("rounds", "samples"):
        assert columns[f"history:{name}"].tolist() == expected.history[name].tolist()
    counted = expected.state.estimates[0]["gradient"].count
    assert draws(tmp_path) == counted.tolist()


def test_a_client_visits_what_it_visits_in_the_simulation(ridge):
    samples, word, count = ridge[0].lower_samples, jnp.uint32(9), jnp.full(CLIENTS, 4)
    for index in range(CLIENTS):
        own = flower.client_of(*ridge, index=index).problem().lower_samples
        assert own.pieces == samples.sizes[index] == own.sizes[0]
        number = own.number(jax.random.key(0), word, count[:1])
        assert number == samples.number(jax.random.key(0), word, count)[index]


def test_a_lost_reply_does_not_count_draws_twice(ridge, tmp_path):
    """Client 1 has made its step, and its reply is lost; all are needed, so it is asked again."""
    lost = []

    def lie(node, message, reply):
        asked = message.metadata.message_type == "train.exchange"
        if asked and node == NODES[1] and len(lost) in (0, 2, 4):
            lost.append(from_records(message.content).words["step"])
            raise RuntimeError("lost")
        lost.extend([None] * (asked and node == NODES[1]))
        return reply

    _, columns, _, error = serve(ridge, E2, tmp_path, {"outer-steps": 7}, lie=lie, record=both)
    assert error is None
    assert lost[:5:2] == [-1, 0, 1]
    expected = simulated(ridge, E2, 7)
    np.testing.assert_allclose(columns["history:x"][::3], expected.history["x"][::3], atol=1e-12)
    assert draws(tmp_path) == expected.state.estimates[0]["gradient"].count.tolist()


def test_a_client_that_is_sent_back_takes_its_draws_back(ridge, tmp_path):
    """All but client 0 go on from older copies of their disks: three steps are made again."""
    place, saved, resume = tmp_path / "run", tmp_path / "saved", {"outer-steps": 6}

    def before(node, message):
        if from_records(message.content).words.get("step") == 2 and not saved.exists():
            shutil.copytree(place, saved)
            shutil.copytree(place / "checkpoints", tmp_path / "older")

    assert serve(ridge, E3, place, resume, before=before, look=False) is None
    assert draws(place) == [18, 18, 18]
    (ahead,) = (place / "states").glob("*/client-0")
    (back,) = (saved / "states").glob("*/client-0")
    shutil.rmtree(back)
    shutil.copytree(ahead, back)
    resume |= {"resume-from": str(saved / "checkpoints")}
    assert serve(ridge, E3, saved, resume, run=2, look=False) is None
    assert draws(saved) == [18, 18, 18]
    # With none of them at the server's step nobody knows where to go on.
    shutil.rmtree(saved / "states")
    shutil.copytree(place / "states", saved / "states")
    saved.joinpath("checkpoints").rename(saved / "newer")
    shutil.copytree(tmp_path / "older", saved / "checkpoints")
    error = serve(ridge, E3, saved, resume | {"wait": 0.3}, run=3, look=False)
    assert "client 1: it is ahead of this checkpoint, an older copy" in str(error)


@pytest.mark.parametrize("at", [6, 11])
def test_killed_in_mid_run_it_goes_on_bit_for_bit(ridge, tmp_path, at):
    """The server dies, and every client's process with it: epochs go on from the disk."""
    whole = serve(ridge, E2, tmp_path / "whole", {"outer-steps": 7}, record=both)[1]
    with pytest.raises(Killed):
        serve(ridge, E2, tmp_path / "cut", {"outer-steps": 7}, before=killed_at(at), record=both)
    resume = {"outer-steps": 7}
    if any((tmp_path / "cut" / "checkpoints").glob("*.npz")):
        resume["resume-from"] = str(tmp_path / "cut" / "checkpoints")
    _, columns, _, error = serve(ridge, E2, tmp_path / "cut", resume, record=both, run=2)
    assert error is None
    np.testing.assert_array_equal(columns["history:x"][::3], whole["history:x"][::3])
    assert draws(tmp_path / "cut") == draws(tmp_path / "whole")


def test_an_absent_client_goes_on_in_its_epoch(ridge, tmp_path):
    """Client 1 fails when it should compute its part of step 2, and is back for step 3.

    It has drawn nothing in step 2, as clients outside of a cohort of the simulation.
    """
    problem, x0, y0 = ridge
    scripted = Scripted(problem.lower_set.weights, jnp.stack([upper_key(2)]), 1)
    problem = eqx.tree_at(lambda p: (p.upper_set, p.lower_set), problem, (scripted, scripted))
    state = E3.init(problem, x0, y0)
    for step in range(5):
        new = E3.step(problem, state, key=jax.random.key(SEED))
        if step == 2:
            kept = jax.tree.map(
                lambda old, one: one.at[1].set(old[1]) if one.ndim else one,
                *(state.estimates, new.estimates),
            )
            new = dataclasses.replace(new, estimates=kept)
        state = new
    exchanges = []

    def before(node, message):
        if message.metadata.message_type == "train.exchange" and node == NODES[1]:
            exchanges.append(node)
            if len(exchanges) == 3:
                raise RuntimeError("killed")

    _, columns, _, error = serve(
        ridge, E3, tmp_path, {"outer-steps": 5, "min-nodes": 2}, before=before, record=both
    )
    assert error is None
    np.testing.assert_allclose(columns["history:x"][-1], state.x[0], atol=1e-12)
    assert draws(tmp_path) == state.estimates[0]["gradient"].count.tolist() == [15, 12, 15]


def test_a_client_that_lost_its_state_begins_its_epochs_anew(ridge, tmp_path):
    """The corrections of all begin at zero then; the draws of the others stay made."""
    seen = []

    def before(node, message):
        if message.metadata.message_type == "train.exchange" and node == NODES[0]:
            seen.append(node)
            if len(seen) == 4:
                for folder in (tmp_path / "states").glob("*/client-0"):
                    shutil.rmtree(folder)

    error = serve(
        *(ridge, E3, tmp_path, {"outer-steps": 6, "min-nodes": 2}), before=before, look=False
    )
    assert error is None
    first, *others = draws(tmp_path)
    assert others == [18, 18]
    assert 0 < first < 12


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0), (2, 6), (5, 15), (9, 15)], ids=["start", "back", "here", "on"]
)
def test_draws_follow_the_step_that_the_server_asks_for(ridge, step, expected):
    client = flower.client_of(*ridge, index=0)
    start = initial_state(E3, client.x, client.y)
    state = with_first_draws(E3, client.problem(), start)
    trail = Trail()
    for one in range(6):
        counts = jax.tree.map(lambda leaf, at=one: jnp.full_like(leaf, 3 * at), state.estimates)
        at = jnp.asarray(one, state.step.dtype)
        state = dataclasses.replace(state, step=at, estimates=counts)
        trail.note(state)
    trail = Trail.read(trail.columns())
    sent = dataclasses.replace(state, step=jnp.asarray(step, state.step.dtype))
    assert trail.followed(sent).estimates[0]["gradient"].count.tolist() == [expected]


def test_an_estimator_keeps_its_tables_on_the_client(ridge, tmp_path):
    """Also over the death of all processes; the server sees nothing of them."""
    solver = dataclasses.replace(E3, estimator=aipod.SAGA())
    with pytest.raises(Killed):
        serve(ridge, solver, tmp_path, {"outer-steps": 5}, before=killed_at(12), record=both)
    resume = {"outer-steps": 5, "resume-from": str(tmp_path / "checkpoints")}
    _, columns, _, error = serve(ridge, solver, tmp_path, resume, record=both, run=2)
    assert error is None
    expected = simulated(ridge, solver, 5)
    np.testing.assert_allclose(columns["history:x"], expected.history["x"], atol=1e-12)
