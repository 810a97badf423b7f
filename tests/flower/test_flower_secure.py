"""Secure sums: the server sees the sum of the clients' vectors and none of them."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

pytest.importorskip("flwr")

from aipod import federated, flower
from aipod.flower import _coordinator, _masks, _noise, _unmask
from aipod.flower._client import Session
from aipod.flower._local import initial_state
from aipod.flower._masks import as_bytes, as_words
from aipod.flower._parcel import Parcel
from aipod.flower._parts import shared_leaves
from aipod.flower._post import from_records
from aipod.flower._progress import Progress, Terms
from aipod.flower._roll import Roll
from aipod.flower._sums import FOLDER, Sums, Wish, long_key, needed_shares
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.flower_grid import InProcessGrid, context
from tests.flower.test_flower import checkpoint
from tests.flower.test_flower_hostile import E3, both, is_exchange

CLIENTS, STEPS = 4, 4
NODES = [100 + index for index in range(CLIENTS)]


@pytest.fixture(scope="module", autouse=True)
def _eager():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_coordinator, "_LOOK", 0.0)
        yield


@pytest.fixture(scope="module")
def task():
    data = client_data(CLIENTS, 6)
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=3)
    return problem, *(federated.replicate(jnp.full(3, v), CLIENTS) for v in (0.3, -0.2))


def run(
    task, folder, config, *, before=None, privacy=None, node=None, weights=None, seen=None, lie=None
):
    """One run; the error, if any.

    `seen` collects what the server gets; `lie(node, message, reply)` is sent in place of a reply.
    """

    def load_client(context):
        client = flower.client_of(*task, index=int(context.node_config["partition-id"]))
        weight = 1.0 if weights is None else weights[client.index]
        return dataclasses.replace(client, weight=weight)

    own = {"state-dir": str(folder / "states")} | (node or {})
    contexts = {
        n: context(n, node_config=own | {"partition-id": index}) for index, n in enumerate(NODES)
    }
    app = flower.make_client_app(load_client, E3, privacy=lambda _: privacy, cache=False)

    def answer(message, context):
        reply = app(message, context)
        reply = reply if lie is None else lie(context.node_id, message, reply)
        if seen is not None:
            seen.append((context.node_id, from_records(reply.content)))
        return reply

    grid = InProcessGrid(answer, contexts, before or (lambda node, message: None))
    config = {"seed": 7, "wait": 5.0, "checkpoint-dir": str(folder / "checkpoints")} | config
    config = {"outer-steps": STEPS, "min-nodes": 3} | config
    start = flower.Start(jnp.full(3, 0.3), jnp.full(3, -0.2), both)
    try:
        flower.make_server_app(E3, lambda context: start)(grid, context(0, run_config=config))
    except (RuntimeError, ValueError) as error:
        return error
    return None


def path(folder):
    return checkpoint(folder)[0]["history:x"]


def kill_in(phase, occurrence, node=NODES[1]):
    """A client that dies in a phase of some exchange; `update` is an exchange's own request."""
    count = []

    def before(who, message):
        if who != node or not is_exchange(message):
            return
        if from_records(message.content).words.get("phase", "update") == phase:
            count.append(who)
            if len(count) == occurrence:
                raise RuntimeError("killed")

    return before


@pytest.fixture(scope="module")
def plain(task, tmp_path_factory):
    """The run without secure sums; and the one in which client 1 misses the third exchange."""
    folder = tmp_path_factory.mktemp("plain")
    assert run(task, folder / "whole", {}) is None
    assert run(task, folder / "without", {}, before=kill_in("update", 3)) is None
    return path(folder / "whole"), path(folder / "without")


def test_the_result_is_the_plain_one_and_no_vector_is_seen(task, tmp_path, plain):
    seen = []
    assert run(task, tmp_path, {"secure": True}, seen=seen) is None
    np.testing.assert_allclose(path(tmp_path), plain[0], atol=1e-8)
    groups = {name.partition(":")[0].partition("@")[0] for _, p in seen for name in p.arrays}
    assert groups == {"open", "seal", "masked", "share", "model"}
    masked = [v for _, p in seen for name, v in p.arrays.items() if name.startswith("masked:")]
    assert len(masked) == 3 * CLIENTS * STEPS


@pytest.mark.parametrize(("phase", "counted"), [("seal", False), ("mask", False), ("shares", True)])
def test_a_client_that_drops_out_in_the_midst_of_a_round(task, tmp_path, plain, phase, counted):
    """Before its vectors have arrived it is absent; afterwards the sum holds them."""
    killed = kill_in(phase, 3)
    assert run(task, tmp_path / "a", {"secure": True}, before=killed) is None
    expected = plain[0 if counted else 1][:3]
    np.testing.assert_allclose(path(tmp_path / "a")[:3], expected, atol=1e-8)
    assert np.abs(plain[0][2] - plain[1][2]).max() > 1e-4
    # A run that needs everybody waits, and is the undisturbed one.
    config = {"secure": True, "min-nodes": CLIENTS}
    assert run(task, tmp_path / "b", config, before=kill_in(phase, 3)) is None
    np.testing.assert_allclose(path(tmp_path / "b"), plain[0], atol=1e-8)


def test_masked_vectors_look_random():
    """Bytes, bits and neighbours; and nothing of the vector is in them."""
    sums, sealed = ready(4)
    values = {"y.0.1": np.linspace(-1, 1, 20_000)}
    found = sums[0].masked(1, request(sealed, 0), values)["y.0.1"]
    raw = found.view(np.uint8)
    assert scipy.stats.chisquare(np.bincount(raw, minlength=256)).pvalue > 1e-4
    bits = np.unpackbits(raw).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(len(bits))
    high = found.astype(float)
    for other in (values["y.0.1"], np.roll(high, 1)):
        assert abs(np.corrcoef(high, other)[0, 1]) < 5 / math.sqrt(high.size)
    # The same vector in the next round is another one.
    again = {i: one.begin(2, public(sums)) for i, one in sums.items()}
    other = sums[0].masked(2, request(again, 0), values)["y.0.1"]
    assert abs(np.corrcoef(high, other.astype(float))[0, 1]) < 5 / math.sqrt(high.size)
    # Without the self mask, the shares of all others would not be enough to see it either.
    assert np.mean(found == other) < 1e-3


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    ready.folder = tmp_path


def public(sums):
    return {index: one.public for index, one in sums.items()}


def ready(count, wish=None):
    """Clients that have begun round 1, and what they have sent."""
    sums = {}
    for index in range(count):
        place = ready.folder / f"own-{index}"
        place.mkdir(exist_ok=True)
        sums[index] = Sums(place, "run", index, long_key(place, index), wish or Wish())
    return sums, {index: one.begin(1, public(sums)) for index, one in sums.items()}


def request(sealed, index):
    """What the server passes on to one client."""
    arrays = {f"key:{i}": found["seal:key"] for i, found in sealed.items()}
    letters = {f"seal:{i}": found[f"seal:{index}"] for i, found in sealed.items() if i != index}
    return arrays | letters


def begun(sealed):
    keys, owns = (
        {i: as_bytes(found[f"seal:{name}"]) for i, found in sealed.items()}
        for name in ("key", "own")
    )
    return _unmask.Begun(keys, owns, needed_shares(len(keys)))


def test_two_clients_gone_and_one_without_shares_leave_the_sum_of_the_rest():
    sums, sealed = ready(7)
    rng = np.random.default_rng(0)
    values = {i: {"x.0.2": rng.normal(size=50), "y.0.1": rng.normal(size=9)} for i in sums}
    arrived = [0, 1, 3, 4, 6]
    masked = {i: sums[i].masked(1, request(sealed, i), values[i]) for i in arrived}
    given = {
        i: {int(n[6:]): as_bytes(v) for n, v in sums[i].shares(1, set(arrived)).items()}
        for i in arrived[:4]
    }
    found = _unmask.unmasked("run", 1, begun(sealed), masked, given)
    assert found.wrong == found.lost == set()
    for name, value in found.total.items():
        np.testing.assert_allclose(value, sum(values[i][name] for i in arrived), atol=1e-8)
    # Three shares of seven are too few: nothing comes out.
    few = {i: given[i] for i in arrived[:3]}
    found = _unmask.unmasked("run", 1, begun(sealed), masked, few)
    assert not found.total
    assert found.lost == set(sums)


@pytest.mark.parametrize("liar", [0, 4])
def test_wrong_shares_are_found_out_and_do_not_spoil_the_sum(liar):
    """They ended the run. A client has gone, so that shares of both kinds are needed."""
    sums, sealed = ready(6)
    values = {i: {"y.0.1": np.full(4, float(i))} for i in sums}
    arrived = [0, 1, 3, 4, 5]
    masked = {i: sums[i].masked(1, request(sealed, i), values[i]) for i in arrived}
    given = {
        i: {int(n[6:]): as_bytes(v) for n, v in sums[i].shares(1, set(arrived)).items()}
        for i in arrived
    }
    given[liar] = {i: bytes([share[0] ^ 1]) + share[1:] for i, share in given[liar].items()}
    found = _unmask.unmasked("run", 1, begun(sealed), masked, given)
    np.testing.assert_allclose(found.total["y.0.1"], 13.0, atol=1e-8)
    assert found.wrong == {liar}
    # Shares that belong together, of a secret that nobody has committed to.
    other = _masks.split(b"another secret of one and thirty"[:31], range(6), 4)
    for own in (True, False):
        assert begun(sealed).secret(3, own, other) is None
    given = {i: {j: bytes(32) for j in shares} for i, shares in given.items()}
    assert _unmask.unmasked("run", 1, begun(sealed), masked, given).lost == set(sums)


def test_a_client_does_nothing_twice():
    """A server that asks again, with something else, to see a difference."""
    sums, sealed = ready(4)
    one, asked = sums[0], request(sealed, 0)
    values = {"y.0.1": np.ones(3)}
    first = one.masked(1, asked, values)["y.0.1"]
    np.testing.assert_array_equal(one.masked(1, asked, values)["y.0.1"], first)
    with pytest.raises(ValueError, match="under the same masks"):
        one.masked(1, asked, {"y.0.1": np.zeros(3)})
    without = {n: v for n, v in asked.items() if not n.endswith(":3")}
    with pytest.raises(ValueError, match="under the same masks"):
        one.masked(1, without, values)
    one.shares(1, {0, 1, 2})
    one.shares(1, {0, 1, 2})
    with pytest.raises(ValueError, match="ended with other clients"):
        one.shares(1, {0, 1, 2, 3})
    for number in (0, 1):
        with pytest.raises(ValueError, match="round"):
            one.begin(number, {**public(sums), 9: bytes(32)})
    with pytest.raises(ValueError, match="has not begun round 5"):
        one.masked(5, asked, values)


def test_shares_of_both_secrets_of_a_client_are_never_given():
    sums, sealed = ready(4)
    sums[0].masked(1, request(sealed, 0), {"y.0.1": np.ones(3)})
    kept = json.loads((ready.folder / "own-0" / "sums.json").read_text())
    given = sums[0].shares(1, {0, 1, 2})
    for index in range(4):
        letter = bytes.fromhex(kept["held"][str(index)])
        key, own = as_words(letter[:32]), as_words(letter[32:])
        np.testing.assert_array_equal(given[f"share:{index}"], own if index < 3 else key)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s, k: s[0].begin(2, {0: s[0].public, 1: s[1].public}), "asks for 3"),
        (lambda s, k: s[0].begin(2, public(s) | {0: bytes(32)}), "another key as this client's"),
        (lambda s, k: s[0].shares(1, {0, 1}), "at least 3 of those"),
        (lambda s, k: s[0].shares(1, {1, 2, 3}), "must be among them"),
        (lambda s, k: s[0].masked(1, k | {"key:9": k["key:1"]}, {}), "not those that it began"),
        (
            lambda s, k: s[0].masked(1, k | {"key:0": k["key:1"]}, {"y": np.ones(1)}),
            "without this client",
        ),
    ],
)
def test_rounds_that_would_show_a_client_are_refused(act, message):
    sums, sealed = ready(4)
    sums[0].masked(1, request(sealed, 0), {"y": np.ones(1)})
    with pytest.raises(ValueError, match=message):
        act(sums, request(sealed, 0))


def test_keys_that_owners_told_each_other_bind_the_server(tmp_path):
    """The `.pub` files of all clients in one; a key that the server invents is refused."""
    for index in range(3):
        long_key(tmp_path / "own", index)
    pubs = sorted((tmp_path / "own" / FOLDER).glob("*.pub"))
    (tmp_path / "peers").write_text("".join(path.read_text() for path in pubs))
    wish = Wish.of({"secure-peers": str(tmp_path / "peers")})
    assert wish.demanded
    own = Sums(tmp_path, "run", 0, long_key(tmp_path / "own", 0), wish)
    own.begin(1, wish.peers)
    forged = {**wish.peers, 2: _masks.public_of(_masks.key_of(bytes(31)))}
    with pytest.raises(ValueError, match="client 2 is not the one in secure-peers"):
        own.begin(2, forged)
    with pytest.raises(ValueError, match="client 3 is not the one"):
        own.begin(2, {**wish.peers, 3: forged[2]})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"secure-least": "many"}, "secure-least must be a whole number"),
        ({"secure-least": 1}, "secure-least must be a whole number"),
        ({"secure-peers": "/nowhere"}, "must hold a line with index and key"),
    ],
)
def test_bad_wishes_are_told(node, message):
    with pytest.raises(ValueError, match=message):
        Wish.of(node)


def test_a_node_that_demands_secure_sums_takes_part_in_no_other_run(task, tmp_path):
    error = run(task, tmp_path, {"wait": 0.2}, node={"secure-least": 3})
    assert "it failed with ValueError" in str(error)
    assert run(task, tmp_path / "b", {"secure": True}, node={"secure-least": 3}) is None


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"average": "trimmed-mean"}, None, "which secure sums hide"),
        ({"secure": 1}, None, "secure must be true or false"),
        ({}, [1.0, 1.0, 1.0, 2.0], "all clients count alike"),
    ],
)
def test_what_secure_sums_cannot_do_is_told(task, tmp_path, config, weights, message):
    error = run(task, tmp_path, {"secure": True} | config, weights=weights)
    assert message in str(error)


def test_with_secure_sums_each_client_adds_its_share_of_the_noise(task, tmp_path, monkeypatch):
    """The sum over the honest clients has the whole of it, and the account counts as before."""
    sizes, noisy = [], _noise.noisy

    def watched(change, clip, grid, deviation):
        sizes.append(deviation)
        return noisy(change, clip, grid, deviation)

    monkeypatch.setattr("aipod.flower._private.noisy", watched)
    privacy = flower.Privacy(clip=0.2, noise=3.0)
    node = {"secure-least": 4}
    assert run(task, tmp_path, {"secure": True}, privacy=privacy, node=node) is None
    assert len(sizes) == 3 * CLIENTS * STEPS
    assert set(sizes) == {0.2 * 3.0 / 2}
    # A server that asks for secure sums by itself, on nodes that say nothing of it, gets no less.
    assert run(task, tmp_path / "b", {"secure": True, "outer-steps": 1}, privacy=privacy) is None
    assert set(sizes[3 * CLIENTS * STEPS :]) == {0.2 * 3.0}
    account = tmp_path / "states" / ".privacy" / "client-0.json"
    found = json.loads(account.read_text())
    assert found["releases"] == STEPS
    assert found["spent"] == pytest.approx(STEPS * privacy.mu**2)


def test_a_round_that_is_repeated_has_new_noise_and_counts_again(task, tmp_path):
    """Else the sums of two rounds with other clients would show one client with little noise."""
    client = flower.client_of(*task, index=0)
    session = Session(client, E3, tmp_path, flower.Privacy(clip=0.2, noise=3.0), Wish(True, 3))
    state = initial_state(E3, client.x, client.y)
    words = {"run": "abc", "seed": 1, "last": 9, "every": 1, "turn": 0, "step": -1, "secure": True}
    shared = {f"shared:{name}": value for name, value in shared_leaves(E3, state).items()}
    session.handle(Parcel(words | {"reset": True}, shared))
    account = tmp_path / ".privacy" / "client-0.json"
    assert not account.exists()
    others, _ = ready(3)
    others[0] = Sums(tmp_path, "abc", 0, long_key(tmp_path, 0), Wish())
    others = {i: Sums(ready.folder / f"own-{i}", "abc", i, one._key, Wish()) if i else one
              for i, one in others.items()}  # fmt: skip
    for number in (2, 3):
        peers = {f"peer:{i}": as_words(key) for i, key in public(others).items()}
        of_sum = words | {"sums": number, "phase": "seal"}
        sealed = {0: session.handle(Parcel(of_sum, peers)).arrays}
        sealed |= {i: others[i].begin(number, public(others)) for i in (1, 2)}
        asked = Parcel(of_sum | {"phase": "mask"}, request(sealed, 0))
        first, again = session.handle(asked), session.handle(asked)
        for name, value in first.arrays.items():
            np.testing.assert_array_equal(value, again.arrays[name])
        assert json.loads(account.read_text())["releases"] == number - 1


def test_numbers_survive_the_way_and_too_large_ones_are_cut():
    values = np.array([0.0, -1.5, 1e-9, 1e9, -np.inf, np.nan, 3.25])
    with np.errstate(over="ignore"):
        total = _masks.encoded(values) + _masks.encoded(values)
    expected = 2 * np.array([0, -1.5, 1e-9, _masks.LARGEST, -_masks.LARGEST, 0, 3.25])
    np.testing.assert_allclose(_masks.decoded(total), expected, atol=1e-9)


class Greeting:
    """A post that brings each node's greeting."""

    def __init__(self, greetings):
        self.greetings = greetings

    def nodes(self):
        return list(self.greetings)

    def send(self, parcels, seconds):
        return {node: str(node) for node in parcels}

    def collect(self, tickets):
        return {ticket: Parcel(self.greetings[int(ticket)]) for ticket in tickets}


def test_keys_of_others_and_keys_that_stop_everybody_are_refused():
    """Each of them made the honest clients fail, round after round."""
    good = "09" + "00" * 31
    keys = {1: good, 2: good, 3: "00" * 32, 4: "01" + "00" * 31}
    said = {"clients": 4, "weight": 1.0, "solver": "s", "step": -1, "exchange": -1}
    greetings = {n: said | {"index": n - 1, "key": key} for n, key in keys.items()}
    lines, terms = [], Terms(steps=1, secure=True)
    roll = Roll(Greeting(greetings), terms, Progress("run"), "s", lines.append)
    roll.look(0.0)
    roll.look(0.0)
    assert list(roll.arrived) == [0]
    assert lines == [
        "node 2 is refused: its key is another client's",
        "node 3 is refused: nobody can agree on anything with its key",
        "node 4 is refused: nobody can agree on anything with its key",
    ]
