"""Short messages on Flower: the simulation's numbers, whatever is lost or damaged."""

import dataclasses
import itertools
import shutil

import jax
import numpy as np
import optax
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import flower
from aipod.flower import _coordinator
from aipod.flower._client import Session
from aipod.flower._local import Worker, initial_state, without_the_rest
from aipod.flower._post import from_records
from aipod.flower._short import lengthened, short_size, shortened
from aipod.flower._sums import Wish
from aipod.sets import TrimmedMean
from aipod.slots import message_bytes
from aipod.slots._compression import KINDS, told
from tests.federated.test_federated import client_data
from tests.flower.test_flower import NODES, SEED, both, serve
from tests.flower.test_flower_hostile import asked, changed, is_exchange, value, words
from tests.flower.test_flower_liars import robust, task_of

FIXED = {"lower_lr": 0.1, "adjoint_lr": 0.1, "lower_steps": 3, "adjoint_steps": 2, "damping": 0.0}
SHORT = aipod.E3AiPOD(**FIXED, upper_optimizer=optax.sgd(0.05), compression="bfloat16")
STEPS = 8


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Clients that come back are seen at once."""
    monkeypatch.setattr(_coordinator, "_LOOK", 0.0)


def simulated(task, solver):
    return aipod.solve(
        *(task[0], solver, *task[1:], STEPS), key=jax.random.key(SEED), record=both, every=1
    ).history


@pytest.fixture(scope="module")
def expected(ridge):
    return simulated(ridge, SHORT)


def run(task, folder, *, solver=SHORT, before=lambda node, message: None, lie=None, **config):
    """The columns of a run that must complete."""
    _, columns, _, error = serve(
        *(task, solver, folder, {"outer-steps": STEPS} | config),
        before=before,
        record=both,
        lie=lie,
    )
    assert error is None
    assert columns["history:step"].tolist() == list(range(1, STEPS + 1))
    return columns


def same(columns, expected):
    for part in ("x", "y"):
        np.testing.assert_allclose(columns[f"history:{part}"], expected[part], atol=1e-9)


@pytest.mark.parametrize(
    "solver",
    [
        SHORT,
        aipod.E3AiPOD(**FIXED, upper_lr=0.05, compression="float16"),
        aipod.E3AiPOD(lower_steps=3, compression="bfloat16"),
        aipod.E3AiPOD(**FIXED, upper_lr=0.05, compression="float4"),
    ],
    ids=["optimiser", "step size", "defaults", "4 bits"],
)
def test_the_trajectory_and_the_bytes_are_the_simulation_s(ridge, tmp_path, solver):
    """The numbers that the defaults need, for step sizes and for the pace of x, travel whole.

    Some of them are sums in which the clients' weights count.
    """
    kinds = set()

    def watch(node, message, reply):
        arrays = from_records(reply.content).group("asked").items()
        kinds.update((name[0], part.dtype.name) for name, part in arrays)
        return reply

    columns, found = run(ridge, tmp_path, solver=solver, lie=watch), simulated(ridge, solver)
    same(columns, found)
    assert columns["history:bytes_up"].tolist() == found["bytes_up"].tolist()
    assert kinds - {("n", "float64")} == {("x", "uint8"), ("y", "uint8")}


def test_replies_that_are_lost_and_a_client_that_is_killed_change_nothing(
    ridge, tmp_path, expected
):
    """The message is made again from what is on disk, with the same bits."""
    count = itertools.count()

    def before(node, message):
        if is_exchange(message) and node == NODES[1] and next(count) == 2:
            raise RuntimeError("killed before it computed")

    def lie(node, message, reply):
        if is_exchange(message) and node == NODES[2] and next(count) == 6:
            raise RuntimeError("lost on its way")
        return reply

    same(run(ridge, tmp_path, before=before, lie=lie), expected)
    assert next(count) > 2 * STEPS


def test_a_server_that_starts_again_knows_what_it_knew(ridge, tmp_path, expected):
    _, columns, _, error = serve(ridge, SHORT, tmp_path, {"outer-steps": 3}, record=both)
    assert error is None
    assert np.abs(columns["known-1:y.0"] - columns["history:y"][-1]).max() < 0.5
    same(run(ridge, tmp_path, **{"resume-from": str(tmp_path / "checkpoints")}), expected)


def test_a_client_that_lost_its_disk_makes_all_begin_anew_together(ridge, tmp_path, expected):
    resets = []

    def before(node, message):
        if is_exchange(message) and node == NODES[0]:
            resets.append(bool(from_records(message.content).words.get("reset")))
            if len(resets) == 4:
                for folder in (tmp_path / "states").glob("*/client-0"):
                    shutil.rmtree(folder)

    columns = run(ridge, tmp_path, before=before)
    assert resets.count(True) == 2
    # Corrections of zero lead on to the same place by another way.
    gap = np.abs(columns["history:y"] - expected["y"]).max(axis=1)
    assert gap[2] < 1e-9 < gap[-1] < 0.05


def bits(pattern):
    def filled(old):
        return np.full(old.size // 2, pattern, np.uint16).view(np.uint8)

    return value(lambda old: filled(old) if old.dtype == np.uint8 else old)


HOSTILE = {
    "NaN": bits(0x7FC0),
    "infinity": bits(0x7F80),
    "whole numbers": value(lambda old: old.astype(np.float64)),
    "too short": value(lambda old: old[:-1]),
    "too long": value(lambda old: np.tile(old, 1000)),
    "a row that nobody has": asked(lambda name, old: (name.replace("y.1.", "y.7."), old)),
    "a number in bytes": asked(lambda name, old: (name.replace("y.1.", "number.0."), old)),
    "other bits than it says": words(known="0" * 16),
    "no word about it": words(known=None),
    "a word of another kind": words(known=7),
}


@pytest.mark.parametrize("name", ["once", "strayed"])
def test_damaged_messages_are_refused_and_leave_no_trace(ridge, tmp_path, expected, name):
    """Each kind once. A client whose state does not fit makes corrections begin anew."""
    strays = [kind for kind in HOSTILE if "word" in kind or "says" in kind]
    kinds = strays[:1] if name == "strayed" else [kind for kind in HOSTILE if kind not in strays]
    # After each of them the client is itself: NaN twice in a round is divergence.
    left = [change for kind in kinds for change in (None, HOSTILE[kind])]

    def lie(node, message, reply):
        if node == NODES[1] and is_exchange(message) and left:
            change = left.pop(0)
            return reply if change is None else changed(message, reply, change)
        return reply

    columns = run(ridge, tmp_path, lie=lie)
    assert not left
    if name == "once":
        same(columns, expected)
    else:
        gap = np.abs(columns["history:y"] - expected["y"]).max(axis=1)
        assert gap[0] < 1e-9 < gap[-1] < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_rounded_as_the_simulation_rounds(kind):
    """Two arrays in a row, each with its own largest number, one of them zero."""
    rng = np.random.default_rng(0)
    for size in (5, 8):
        parts = rng.normal(size=size) * np.geomspace(1e-4, 3, size), np.zeros(3), rng.normal(size=1)
        value, known = np.concatenate(parts), rng.normal(size=size + 4)
        sizes = [size, 3, 1]
        raw = shortened(value, known, kind, sizes)
        assert (
            raw.nbytes == sum(message_bytes(one, kind) for one in sizes) == short_size(sizes, kind)
        )
        ends = np.cumsum(sizes)[:-1]
        pairs = zip(np.split(value, ends), np.split(known, ends), strict=True)
        told_ = np.concatenate([told(a[None], b[None], kind)[0] for a, b in pairs])
        np.testing.assert_allclose(lengthened(raw, known, kind, sizes), told_, rtol=1e-12)


@pytest.mark.parametrize("kind", ["float8", "float4"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_largest_numbers_that_are_none_are_noticed(kind, scale):
    raw = shortened(np.arange(4.0), np.zeros(4), kind, [4])
    raw[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    assert not np.isfinite(lengthened(raw, np.zeros(4), kind, [4])).all()


def test_it_goes_with_robust_averages(tmp_path):
    task = task_of(client_data(3, 6))
    columns = run(task, tmp_path, average="trimmed-mean:0.34")
    same(columns, simulated(robust(task, TrimmedMean(0.34)), SHORT))


def test_what_it_does_not_go_with_is_told(ridge, tmp_path):
    client = flower.client_of(*ridge, index=0)
    with pytest.raises(ValueError, match="privacy needs whole vectors: leave compression out"):
        Session(client, SHORT, tmp_path, flower.Privacy(clip=1.0, noise=1.0))
    with pytest.raises(ValueError, match="secure sums needs whole vectors"):
        Session(client, SHORT, tmp_path, wish=Wish(True, 2))
    with pytest.raises(ValueError, match="compression needs all clients in every round"):
        serve(ridge, SHORT, tmp_path, {"outer-steps": 2, "min-nodes": 2}, look=False)


def test_an_absent_client_keeps_its_correction_where_points_are_sent_without(ridge):
    """It was set to zero with robust averages."""
    solver = aipod.E3AiPOD(**FIXED, upper_optimizer=optax.sgd(0.05))
    client = flower.client_of(*ridge, index=0)
    state = initial_state(solver, client.x, client.y)
    own = dataclasses.replace(state.lower, correction=state.lower.correction + 0.25)
    state = dataclasses.replace(state, lower=own)
    worker = Worker(solver, client.problem(), state)
    worker.robust = True
    new, *_ = worker.attempt(state, jax.random.key(0), without_the_rest(worker.no_answers()))
    np.testing.assert_allclose(new.lower.correction, 0.25, atol=1e-12)
