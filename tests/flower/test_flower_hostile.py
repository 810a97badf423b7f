"""Malformed and hostile messages: the run goes on with the honest clients, and is saved."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import aipod
from aipod import federated, flower
from aipod.flower import _apps, _coordinator
from aipod.flower._parcel import Parcel, plain
from aipod.flower._post import from_records, to_records
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.flower_grid import InProcessGrid, context
from tests.flower.test_flower import checkpoint

CLIENTS = 3
HONEST, HOSTILE = [100, 101, 102], 103
E3 = aipod.E3AiPOD(
    upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, lower_steps=3, adjoint_steps=2, damping=0.0
)
SLOW = {"wait": 0.4, "round-timeout": 60.0}


@pytest.fixture(scope="module", autouse=True)
def _eager():
    """Clients that come back are seen at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_coordinator, "_LOOK", 0.0)
        yield


@pytest.fixture
def log(monkeypatch):
    """The lines of the server's log."""
    lines = []
    monkeypatch.setattr(_apps._log, "info", lambda form, *words: lines.append(form % words))
    return lines


def both(x, y):
    return {"x": federated.average(x, None), "y": federated.average(y, None)}


def nodes_of(indices, folder):
    """Contexts by node, for honest nodes from 100 on and hostile ones after them."""
    return {
        100 + place: context(
            100 + place, node_config={"partition-id": index, "state-dir": str(folder / "states")}
        )
        for place, index in enumerate(indices)
    }


def serve(task, folder, config, *, indices=range(CLIENTS), lie=None, before=None, record=both):
    """One run; `lie(node, message, reply)` replaces what a node sends. The error, if any."""

    def load_client(context):
        return flower.client_of(*task, index=int(context.node_config["partition-id"]))

    def start(context):
        x0, y0 = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in task[1:])
        return flower.Start(x0, y0, record)

    app = flower.make_client_app(load_client, E3, cache=False)

    def answer(message, context):
        reply = app(message, context)
        return reply if lie is None else lie(context.node_id, message, reply)

    before = before or (lambda node, message: None)
    grid = InProcessGrid(answer, nodes_of(indices, folder), before)
    config = {"seed": 7, "wait": 10.0, "checkpoint-dir": str(folder / "checkpoints")} | config
    try:
        flower.make_server_app(E3, start)(grid, context(0, run_config=config))
    except RuntimeError as error:
        return error
    return None


def is_exchange(message):
    return message.metadata.message_type.endswith("exchange")


def changed(message, reply, change):
    """The reply with its parcel changed, or with records in place of it, or an error of Flower."""
    made = change(from_records(reply.content))
    if isinstance(made, Error):
        return Message(made, reply_to=message)
    content = to_records(made) if isinstance(made, Parcel) else made
    return Message(content, reply_to=message)


def words(**new):
    """Words replaced, or left out by None."""

    def change(parcel):
        all_of_them = {**parcel.words, **new}
        kept = {name: word for name, word in all_of_them.items() if word is not None}
        return dataclasses.replace(parcel, words=kept)

    return change


def asked(change):
    """Every question replaced by what `change` makes of its name and value."""

    def all_of_them(parcel):
        arrays = dict(
            change(name, value) if name.startswith("asked:") else (name, value)
            for name, value in parcel.arrays.items()
        )
        return dataclasses.replace(parcel, arrays=arrays)

    return all_of_them


def value(make):
    return asked(lambda name, old: (name, make(np.array(old))))


def filled(number):
    return value(lambda old: np.full_like(old, number))


def first_only(number):
    def make(old):
        old[0] = number
        return old

    return value(make)


def arrays(**new):
    return lambda parcel: dataclasses.replace(
        parcel, arrays={**parcel.arrays, **{n.replace("__", ":"): v for n, v in new.items()}}
    )


def raw(**content):
    """Records that are not those of a parcel."""
    return lambda parcel: RecordDict({"w": ConfigRecord(content)})


def model(step, make=lambda old: old, **changes):
    def change(parcel):
        leaves = {
            "x0": np.zeros((1, 3)),
            "y0": np.zeros((1, 3)),
            "counts": np.zeros(8, np.int32),
        } | changes
        named = {f"model@{step}:{k}": make(v) for k, v in leaves.items() if v is not None}
        return dataclasses.replace(parcel, arrays={**parcel.arrays, **named})

    return change


def object_array(parcel):
    array = Array("object", (1,), "numpy.ndarray", b"not an array")
    record = ConfigRecord({"a": ["asked:y.0.1 float64 3"], "step": 1})
    return RecordDict({"a": ArrayRecord({"b": array}), "w": record})


REPLIES = {
    # What is not a parcel.
    "nothing": lambda parcel: RecordDict({}),
    "no words": lambda parcel: RecordDict({"v": ConfigRecord({"step": 1})}),
    "lines that are a number": raw(step=1, a=3, b=b""),
    "lines that are bytes": raw(step=1, a=[b"\xff\xfe"], b=b""),
    "lines that are numbers": raw(step=1, a=[1, 2], b=b""),
    "an empty line": raw(step=1, a=[""], b=b""),
    "a line without a type": raw(step=1, a=["asked:y.0.1"], b=b""),
    "bytes that are text": raw(step=1, a=["asked:y.0.1 float64 3"], b="abc"),
    "bytes that are missing": raw(step=1, a=["asked:y.0.1 float64 3"]),
    "too few bytes": raw(step=1, a=["asked:y.0.1 float64 300000000"], b=b"abc"),
    "too many bytes": raw(step=1, a=["asked:y.0.1 float64 1"], b=b"x" * 80),
    "negative lengths": raw(step=1, a=["asked:y.0.1 float64 -3x-1"], b=b"x" * 24),
    "huge lengths": raw(step=1, a=["asked:y.0.1 float64 " + "9" * 400], b=b"x" * 24),
    "empty and huge lengths": raw(
        step=1, a=["asked:y.0.1 float64 0x" + "9" * 12 + "x9999999"], b=b""
    ),
    "many axes": raw(step=1, a=["asked:y.0.1 float64 " + "1x" * 70 + "3"], b=b"x" * 24),
    "objects": raw(step=1, a=["asked:y.0.1 object 3"], b=b"x" * 24),
    "the same array twice": raw(step=1, a=["asked:y.0.1 float64 3"] * 2, b=b"\0" * 48),
    "an object in an array record": object_array,
    "an error of Flower": lambda parcel: Error(2, "\x1b[31mred\nand more"),
    "an error without a reason": lambda parcel: Error(0, " \n "),
    # Words.
    "no step": words(step=None),
    "a step of text": words(step="1"),
    "a step of bytes": words(step=b"\xff"),
    "a fractional step": words(step=1.0),
    "a true step": words(step=True),
    "a list of steps": words(step=[1]),
    "a negative step": words(step=-1),
    "a step in the future": words(step=2**31 - 1),
    "an endless step": words(step=2**62),
    "another step": lambda parcel: words(step=(int(parcel.words["step"]) + 1) % 5)(parcel),
    "an error that is a number": words(error=3),
    "an error that is long": words(error="x" * 100_000),
    "an error with escapes": words(error="\x1b[2J\x00\u202e"),
    # Arrays.
    "no questions": asked(lambda name, old: (f"shared:{name}", old)),
    "nothing asked": lambda parcel: dataclasses.replace(parcel, arrays={}),
    "NaN": filled(np.nan),
    "one NaN": first_only(np.nan),
    "infinity": filled(np.inf),
    "minus infinity in one place": first_only(-np.inf),
    "almost infinity": filled(1e300),
    "another type": value(lambda old: old.astype(np.float32)),
    "whole numbers": value(lambda old: np.ones(old.shape, np.int64)),
    "a longer array": value(lambda old: np.ones(old.size + 1)),
    "a huge array": value(lambda old: np.ones(1_000_000)),
    "an empty array": value(lambda old: np.ones(0)),
    "a matrix": value(lambda old: old[None]),
    "a number": value(lambda old: old[0]),
    "an unknown table": asked(lambda name, old: (name.replace(":y", ":q"), old)),
    "an unknown kind": asked(lambda name, old: (name[:-1] + "7", old)),
    "a row far away": asked(lambda name, old: (name.replace(".0.", ".999999."), old)),
    "a row beyond": asked(lambda name, old: (name.replace(".0.", ".99999999999."), old)),
    "a row that is none": asked(lambda name, old: (name.replace(".0.", ".x."), old)),
    "another kind": asked(lambda name, old: (name[:-1] + "4", old)),
    "one question more": arrays(**{"asked__number.7.3": np.ones(1)}),
    "odd names": arrays(**{"\u00fc;rm": np.ones(1)}),
    "a name of nothing": arrays(**{"__": np.ones(1)}),
    "another group": arrays(**{"answer__y.0": np.ones(3)}),
    "an unknown state": arrays(**{"shared__999": np.ones(3)}),
    "a part of a state": arrays(**{"shared__0": np.ones((1, 3))}),
    "a state of another shape": arrays(**{"shared__0": np.ones(3)}),
    "a model of the future": model(2**31 - 1),
    "a model of step 0": model(0),
    "a model of the last step": model(10_000),
    "a model of no step": model("x"),
    "a part of a model": model(10, y0=None),
    "a model of another shape": model(10, x0=np.zeros((7, 3))),
    "a model of another type": model(10, counts=np.zeros(8)),
    "a model that nobody wants": model(3),
    "a model of NaN": model(10, make=lambda old: old + np.nan if old.dtype.kind == "f" else old),
}


def test_there_are_enough_of_them():
    assert len(REPLIES) + len(GREETINGS) >= 60


def test_no_reply_ends_the_run_and_the_others_go_on_without_it(tmp_path, log):
    """Two honest clients, and four that answer each request with another lie, and come back."""
    data = client_data(6, 6)

    def task(data):
        problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=None)
        return problem, *(federated.replicate(jnp.full(3, v), len(data)) for v in (0.3, -0.2))

    steps, liars = 40, [102, 103, 104, 105]
    config = {"outer-steps": steps, "every": 10, "min-nodes": 2} | SLOW
    told = []

    def lie(node, message, reply):
        if node not in liars or not is_exchange(message):
            return reply
        told.append(list(REPLIES)[len(told) % len(REPLIES)])
        return changed(message, reply, REPLIES[told[-1]])

    assert serve(task(data), tmp_path, config, indices=range(6), lie=lie) is None
    assert set(told) == set(REPLIES)
    absent = [line for line in log if " is absent: " in line]
    assert len(absent) == len(told)
    assert all(line.isprintable() and len(line) < 400 for line in log)
    found, extra = checkpoint(tmp_path)
    assert extra["progress"]["counted"] == [0, 1]
    assert found["history:step"].tolist() == [10, 20, 30, 40]
    # The run is that of the honest clients alone, and so is what it reaches.
    alone = aipod.solve(
        *((honest := task(data[:2]))[0], E3, *honest[1:], steps),
        key=jax.random.key(7),
        record=both,
        every=10,
    )
    np.testing.assert_allclose(found["history:x"], alone.history["x"], rtol=0, atol=1e-6)


GREETINGS = {
    "nothing": lambda parcel: RecordDict({}),
    "no words": lambda parcel: Parcel({}),
    "an error": lambda parcel: Parcel({"error": "ValueError"}),
    "an error with data": lambda parcel: Parcel({"error": b"\x00\xff"}),
    "an error of Flower": lambda parcel: Error(2, ""),
    "no index": words(index=None),
    "an index of text": words(index="1"),
    "a negative index": words(index=-1),
    "an index beyond": words(index=CLIENTS),
    "a true index": words(index=True),
    "a huge index": words(index=2**61),
    "no clients": words(clients=None),
    "one client": words(clients=1),
    "0 clients": words(clients=0),
    "clients of text": words(clients="three"),
    "many clients": words(clients=2**40),
    "no weight": words(weight=None),
    "weight NaN": words(weight=float("nan")),
    "weight infinity": words(weight=float("inf")),
    "weight negative": words(weight=-1.0),
    "weight 0": words(weight=0.0),
    "weight text": words(weight="1"),
    "weight true": words(weight=True),
    "no solver": words(solver=None),
    "another solver": words(solver="0" * 16),
    "a list of solvers": words(solver=["a"]),
    "no step": words(step=None),
    "a step in the future": words(step=2**31 - 1),
    "a step before all": words(step=-2),
    "a fractional step": words(step=1.5),
    "no exchange": words(exchange=None),
    "an exchange of text": words(exchange="1"),
    "an exchange before all": words(exchange=-5),
    "non-text": raw(solver=b"\xff\xfe", index=b"\xff"),
}


def test_no_greeting_ends_the_run(ridge, tmp_path, log):
    """Three honest nodes, and one for each lie: the run is that of the three."""
    liars = dict(zip(itertools.count(HOSTILE), GREETINGS.values()))

    def lie(node, message, reply):
        return changed(message, reply, liars[node]) if node in liars else reply

    config = {"outer-steps": 3, "min-nodes": 2, "wait": 5.0}
    indices = [*range(CLIENTS), *itertools.repeat(0, len(liars))]
    assert serve(ridge, tmp_path / "a", config, indices=indices, lie=lie) is None
    assert serve(ridge, tmp_path / "b", config) is None
    found, alone = (checkpoint(tmp_path / name)[0] for name in "ab")
    np.testing.assert_array_equal(found["history:x"], alone["history:x"])
    refused = {int(line.split()[2]) for line in log if " is refused: " in line}
    silent = {int(line.split()[2]) for line in log if " does not answer: " in line}
    assert refused | silent == set(liars)
    assert all(line.isprintable() and len(line) < 400 for line in log)


def greets(node, **new):
    """A node that lies in its greeting and is honest otherwise."""

    def lie(who, message, reply):
        if who != node or is_exchange(message):
            return reply
        return changed(message, reply, words(**new))

    return lie


def final(folder):
    return checkpoint(folder)[0]["history:x"][-1]


@pytest.fixture(scope="module")
def undisturbed(ridge, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert serve(ridge, folder, {"outer-steps": 3}) is None
    return final(folder)


def test_a_first_greeting_does_not_decide_how_many_clients_there_are(
    ridge, tmp_path, log, undisturbed
):
    """The first node claims to be the only client, and with that the index of another."""
    lie = greets(HONEST[0], clients=1, index=0)
    indices = [0, 0, 1, 2]
    assert serve(ridge, tmp_path, {"outer-steps": 3} | SLOW, indices=indices, lie=lie) is None
    np.testing.assert_array_equal(final(tmp_path), undisturbed)
    assert "aipod: node 100 is refused: it counts 1 clients, others 3" in log


def test_the_configuration_says_how_many_clients_there_are(ridge, tmp_path, log):
    """Even if all nodes that are there agree on something else."""

    def lie(node, message, reply):
        return reply if is_exchange(message) else changed(message, reply, words(clients=1))

    config = {"outer-steps": 1, "clients": 3} | SLOW
    error = serve(ridge, tmp_path, config, indices=[0], lie=lie)
    assert "it counts 1 clients, others 3" in str(error)


def test_a_run_does_not_begin_with_fewer_clients_than_it_needs(ridge, tmp_path, log):
    lie = greets(HONEST[0], clients=1)
    error = serve(ridge, tmp_path, {"outer-steps": 1, "min-nodes": 2} | SLOW, indices=[0], lie=lie)
    assert "it counts 1 clients, but the run needs 2" in str(error)


@pytest.mark.parametrize("clients", [CLIENTS, 2])
def test_a_heavy_client_is_refused(ridge, tmp_path, log, clients):
    """Also if there are but two: a client must not be the measure of its own weight."""
    lie = greets(HONEST[clients - 1], weight=1e30)
    config = {"outer-steps": 2, "min-nodes": clients - 1} | SLOW
    assert serve(ridge, tmp_path, config, indices=range(clients), lie=lie) is None
    assert any("its weight is 1e+30, more than 10 times the median" in line for line in log)
    _, extra = checkpoint(tmp_path)
    assert dict(extra["progress"]["weights"]).keys() == set(range(clients - 1))


def test_the_ratio_of_weights_can_be_chosen(ridge, tmp_path, log):
    lie = greets(HONEST[2], weight=1e5)
    assert serve(ridge, tmp_path / "a", {"outer-steps": 1, "weight-ratio": 1e6}, lie=lie) is None
    config = {"outer-steps": 1, "weight-ratio": 1.0, "min-nodes": 2} | SLOW
    assert serve(ridge, tmp_path / "b", config) is None
    assert any("its weight is 0.5, more than 1 times the median" in line for line in log)


def test_weights_in_the_configuration_win(ridge, tmp_path, log, undisturbed):
    lie = greets(HONEST[2], weight=1e30)
    config = {"outer-steps": 3, "weights": "1, 2, 3"}
    assert serve(ridge, tmp_path, config, lie=lie) is None
    np.testing.assert_allclose(final(tmp_path), undisturbed, rtol=1e-12)


def test_a_weight_does_not_change_during_a_run(ridge, tmp_path, log):
    """Client 2 fails once, and comes back with another weight."""
    failed = []

    def lie(node, message, reply):
        if node == HONEST[2] and is_exchange(message) and len(failed) < 1:
            failed.append(node)
            return Message(Error(2, "gone"), reply_to=message)
        if node == HONEST[2] and not is_exchange(message) and failed:
            return changed(message, reply, words(weight=900.0))
        return reply

    assert serve(ridge, tmp_path, {"outer-steps": 4, "min-nodes": 2}, lie=lie) is None
    _, extra = checkpoint(tmp_path)
    weights = dict(extra["progress"]["weights"])
    assert weights[2] == 3 * weights[0]
    assert 2 in extra["progress"]["counted"]


def test_an_index_belongs_to_the_first_node_that_claims_it(ridge, tmp_path, log, undisturbed):
    indices = [0, 1, 2, 1]
    assert serve(ridge, tmp_path, {"outer-steps": 3}, indices=indices) is None
    np.testing.assert_array_equal(final(tmp_path), undisturbed)
    assert "aipod: node 103 claims to be client 1, which node 101 is" in log


def test_a_client_that_fails_does_not_lose_its_index(ridge, tmp_path, log):
    """Another node waits for that, and a client that took part claims to be another one."""
    greetings = {101: 0, 102: 0}

    def lie(node, message, reply):
        if is_exchange(message):
            step = from_records(message.content).words["step"]
            if node in greetings and step == 1:
                return Message(Error(2, "gone"), reply_to=message)
            return reply
        if node == 102:
            greetings[102] += 1
            return changed(message, reply, words(index=1)) if greetings[102] > 1 else reply
        return reply

    error = serve(ridge, tmp_path, {"outer-steps": 3} | SLOW, indices=[0, 1, 2, 1], lie=lie)
    assert "only" in str(error)
    assert any("node 102 is refused: it claims to be client 1, and was 2" in line for line in log)
    assert not any(line.startswith("aipod: node 103 is") for line in log)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_numbers_that_cannot_be_averaged_leave_the_last_finite_model(ridge, tmp_path, log, number):
    """All clients diverge in the third step: the run ends as diverged, without a row of NaN."""

    def lie(node, message, reply):
        if is_exchange(message) and from_records(message.content).words["step"] >= 2:
            spoiled = filled(number)
            made = changed(message, reply, spoiled)
            parcel = from_records(made.content)
            leaves = {
                k: np.full_like(v, number) if k.startswith("model@") and v.dtype.kind == "f" else v
                for k, v in parcel.arrays.items()
            }
            return changed(message, made, lambda p: dataclasses.replace(p, arrays=leaves))
        return reply

    error = serve(ridge, tmp_path, {"outer-steps": 6}, lie=lie)
    assert "diverged at outer step 3" in str(error)
    columns, extra = checkpoint(tmp_path)
    assert columns["history:step"].tolist() == [1, 2]
    assert np.isfinite(columns["history:x"]).all()
    saved = [v for name, v in columns.items() if name.startswith("state:") and v.dtype.kind == "f"]
    assert len(saved) > 2
    assert all(np.isfinite(leaf).all() for leaf in saved)
    assert extra["recorded"] == 2


def test_one_client_that_diverges_ends_a_run_that_needs_it(ridge, tmp_path, log):
    def lie(node, message, reply):
        if node == HONEST[1] and is_exchange(message):
            return changed(message, reply, filled(np.inf))
        return reply

    error = serve(ridge, tmp_path, {"outer-steps": 3, "wait": 30.0}, lie=lie)
    assert "diverged at outer step" in str(error)


def test_one_damaged_message_does_not_end_a_run_that_needs_everyone(
    ridge, tmp_path, log, undisturbed
):
    spoiled = []

    def lie(node, message, reply):
        if node == HONEST[1] and is_exchange(message) and len(spoiled) < 2:
            spoiled.append(node)
            return changed(message, reply, filled(np.nan)) if len(spoiled) == 2 else reply
        return reply

    assert serve(ridge, tmp_path, {"outer-steps": 3, "wait": 30.0}, lie=lie) is None
    np.testing.assert_array_equal(final(tmp_path), undisturbed)


def test_counts_are_those_of_most_clients(ridge, tmp_path, log):
    def lie(node, message, reply):
        if node != HONEST[0] or not is_exchange(message):
            return reply

        def change(parcel):
            return dataclasses.replace(
                parcel,
                arrays={
                    k: v + 1000 if k.endswith(":counts") else v for k, v in parcel.arrays.items()
                },
            )

        return changed(message, reply, change)

    assert serve(ridge, tmp_path / "a", {"outer-steps": 2}, lie=lie) is None
    assert serve(ridge, tmp_path / "b", {"outer-steps": 2}) is None
    found, honest = (checkpoint(tmp_path / name)[0] for name in "ab")
    for name in ("rounds", "samples", "bytes_up"):
        assert found[f"history:{name}"].tolist() == honest[f"history:{name}"].tolist()


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError, MemoryError])
def test_the_text_of_a_client_s_exception_stays_on_the_client(
    ridge, tmp_path, log, monkeypatch, error
):
    secret = "patient 4711"
    told = []
    monkeypatch.setattr(_apps._log, "error", lambda form, *rest, **more: told.append(form % rest))

    def load_client(context):
        if context.node_id == HONEST[1]:
            raise error(secret)
        return flower.client_of(*ridge, index=int(context.node_config["partition-id"]))

    app = flower.make_client_app(load_client, E3, cache=False)
    replies = []

    def answer(message, context):
        replies.append(app(message, context))
        return replies[-1]

    grid = InProcessGrid(answer, nodes_of(range(CLIENTS), tmp_path))
    server = flower.make_server_app(E3, lambda context: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(RuntimeError, match=f"it failed with {error.__name__}, which its own log"):
        server(grid, context(0, run_config={"outer-steps": 1, "wait": 0.3}))
    assert any(secret in line for line in told)
    assert not any(secret in line for line in log)
    assert not any(reply.has_error() for reply in replies)
    for reply in replies:
        assert secret not in repr(from_records(reply.content).words)
    (failure,) = [
        word for r in replies if (word := from_records(r.content).words.get("error")) is not None
    ]
    assert failure == error.__name__


def test_whatever_ends_the_server_it_saves_first(ridge, tmp_path, log):
    def record(x, y):
        raise KeyError("a mistake in the server's own code")

    with pytest.raises(KeyError, match="a mistake"):
        serve(ridge, tmp_path, {"outer-steps": 3}, record=record)
    _, extra = checkpoint(tmp_path)
    assert extra["progress"]["step"] == 0
    assert any("The server failed with KeyError" in line for line in log)


def test_a_disk_that_fills_up_ends_the_run_with_a_sentence(ridge, tmp_path, log, monkeypatch):
    from aipod.flower._book import Book

    saved, save = [], Book.save

    def full(self, progress):
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(progress)
        save(self, progress)

    monkeypatch.setattr(Book, "save", full)
    error = serve(ridge, tmp_path, {"outer-steps": 6})
    assert "No space left on device" in str(error)
    assert "resume-from" in str(error)
    monkeypatch.setattr(Book, "save", save)
    resume = {"outer-steps": 6, "resume-from": str(tmp_path / "checkpoints")}
    assert serve(ridge, tmp_path, resume) is None
    assert checkpoint(tmp_path)[0]["history:step"].tolist() == list(range(1, 7))


def test_a_run_cannot_go_on_with_another_number_of_clients(ridge, tmp_path, log):
    assert serve(ridge, tmp_path, {"outer-steps": 1}) is None
    resume = {"outer-steps": 2, "resume-from": str(tmp_path / "checkpoints"), "clients": 4}
    with pytest.raises(ValueError, match="the run has 3 clients, but its configuration says 4"):
        serve(ridge, tmp_path, resume)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clients": -1}, "clients must be at least 1"),
        ({"clients": 1.5}, "clients must be a whole number"),
        ({"weights": "1, two"}, "weights must be numbers"),
        ({"weights": "1, 0"}, "weights must be positive"),
        ({"weights": "1, nan"}, "weights must be positive"),
        ({"weights": "1, 2", "clients": 3}, "2 weights for 3 clients"),
        ({"weight-ratio": 0.5}, "weight_ratio must be at least 1"),
    ],
)
def test_bad_terms_are_told(config, message):
    server = flower.make_server_app(E3, lambda context: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(ValueError, match=message):
        server(InProcessGrid(None, {}), context(0, run_config={"outer-steps": 1} | config))


def test_what_is_logged_of_a_stranger_s_text_is_short_and_printable():
    assert plain("a\x1b[2Jb\nc") == "a?[2Jb?c"
    assert len(plain("x" * 10_000)) < 250
    assert plain(b"\xff") == "b'\\xff'"
