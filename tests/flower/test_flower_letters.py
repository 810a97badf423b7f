"""Secure sums with letters that cannot be opened, and secrets that do not come together again."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("flwr")

from aipod import flower
from aipod.flower import _masks, _unmask
from aipod.flower._masks import as_bytes, as_words
from aipod.flower._post import from_records
from aipod.flower._shares import recovered
from aipod.flower._sums import Wish
from tests.flower.test_flower_hostile import changed, is_exchange, log  # noqa: F401
from tests.flower.test_flower_secure import (
    CLIENTS,
    NODES,
    _eager,  # noqa: F401
    _folder,  # noqa: F401
    begun,
    path,
    ready,
    request,
    run,
    task,  # noqa: F401
)

VALUES = {"y.0.1": np.array([0.125, -4.5, 6.0])}


def phase(message):
    return from_records(message.content).words.get("phase") if is_exchange(message) else None


def spoil(*names):
    """A parcel in which the arrays with these names are not what they were."""

    def change(parcel):
        arrays = {n: v ^ np.uint32(1) if n in names else v for n, v in parcel.arrays.items()}
        return dataclasses.replace(parcel, arrays=arrays)

    return change


def letters_of(node, to):
    """A client whose letters to some others cannot be opened."""
    names = [f"seal:{index}" for index in to]

    def lie(who, message, reply):
        if who != node or phase(message) != "seal":
            return reply
        return changed(message, reply, spoil(*names))

    return lie


def absent(lines, index):
    return [line for line in lines if f"client {index} is absent" in line]


@pytest.fixture(scope="module")
def plain(task, tmp_path_factory):  # noqa: F811
    """The run with everyone, and the one of all but client 1 from the first exchange on."""

    def gone(node, message):
        if node == NODES[1] and is_exchange(message):
            raise RuntimeError("gone")

    folder = tmp_path_factory.mktemp("plain")
    assert run(task, folder / "whole", {}) is None
    assert run(task, folder / "without", {}, before=gone) is None
    return path(folder / "whole"), path(folder / "without")


def test_letters_that_nobody_can_open_cost_their_sender_its_place(task, tmp_path, plain, log):  # noqa: F811
    """The run stood still: every honest client failed, and the sender stayed."""
    lie = letters_of(NODES[1], [0, 2, 3])
    assert run(task, tmp_path, {"secure": True}, lie=lie) is None
    np.testing.assert_allclose(path(tmp_path), plain[1], atol=1e-8)
    assert len(absent(log, 1)) == 3
    assert "clients [0, 2, 3] cannot open its letters" in absent(log, 1)[0]
    assert not any(absent(log, index) for index in (0, 2, 3))
    assert any("node 101 is refused: it has spoilt 3 secure sums" in line for line in log)


def test_a_run_that_needs_everyone_stops_with_a_reason(task, tmp_path, log):  # noqa: F811
    lie = letters_of(NODES[1], [0, 2, 3])
    config = {"secure": True, "min-nodes": CLIENTS, "wait": 0.5}
    error = run(task, tmp_path, config, lie=lie)
    assert "client 1: clients [0, 2, 3] cannot open its letters" in str(error)


@pytest.mark.parametrize("liar", ["sender", "receiver"])
def test_one_letter_alone_costs_nobody_anything(task, tmp_path, plain, log, liar):  # noqa: F811
    """Only the two know which of them lies, so neither has to go, and the sum is whole."""
    if liar == "sender":
        lie = letters_of(NODES[1], [2])
    else:

        def lie(who, message, reply):
            if who != NODES[2] or phase(message) != "mask":
                return reply
            return changed(
                message,
                reply,
                lambda parcel: dataclasses.replace(
                    parcel, arrays={**parcel.arrays, "closed:1": np.ones((), bool)}
                ),
            )

    config = {"secure": True, "outer-steps": 2}
    error = run(task, tmp_path, config, lie=lie)
    if liar == "sender":
        assert error is None
        assert not any(" is absent" in line for line in log)
        np.testing.assert_allclose(path(tmp_path), plain[0][:2], atol=1e-8)
    else:
        # It then gives a share that it said not to have, and is absent itself.
        assert error is None
        assert not absent(log, 1)
        assert absent(log, 2)
    assert any("clients [2] cannot open the letters of client 1" in line for line in log)


def test_who_accuses_everybody_is_absent_and_nobody_else_is(task, tmp_path, log):  # noqa: F811
    def lie(who, message, reply):
        if who != NODES[3] or phase(message) != "mask":
            return reply
        closed = {f"closed:{index}": np.ones((), bool) for index in (0, 1, 2)}
        return changed(message, reply, lambda parcel: dataclasses.replace(parcel, arrays=closed))

    assert run(task, tmp_path, {"secure": True, "outer-steps": 2}, lie=lie) is None
    assert "it cannot open letters of [0, 1, 2]" in absent(log, 3)[0]
    assert not any(absent(log, index) for index in (0, 1, 2))


def test_a_client_whose_secrets_do_not_come_together_has_to_go(task, tmp_path, plain, log):  # noqa: F811
    """It commits to another secret than the one that it shares: that ended the run."""

    def lie(who, message, reply):
        if who != NODES[1] or phase(message) != "seal":
            return reply
        return changed(message, reply, spoil("seal:own"))

    assert run(task, tmp_path, {"secure": True}, lie=lie) is None
    np.testing.assert_allclose(path(tmp_path), plain[1], atol=1e-8)
    assert "the shares of its secrets do not belong together" in absent(log, 1)[0]
    assert len(absent(log, 1)) == 3


@pytest.mark.parametrize("closed", [{"closed:7": 1}, {"closed:2": 1}, {"closed:": 1}, {}])
def test_complaints_that_make_no_sense_are_refused(task, tmp_path, log, closed):  # noqa: F811
    """About nobody, about oneself, about nothing; or neither complaint nor vectors."""

    def lie(who, message, reply):
        if who != NODES[2] or phase(message) != "mask":
            return reply
        arrays = {name: np.ones((), bool) for name in closed}
        return changed(message, reply, lambda parcel: dataclasses.replace(parcel, arrays=arrays))

    assert run(task, tmp_path, {"secure": True, "outer-steps": 1}, lie=lie) is None
    assert absent(log, 2)
    assert not any(absent(log, index) for index in (0, 1, 3))


def test_no_privacy_is_spent_on_a_round_that_a_client_declines(task, tmp_path, log):  # noqa: F811
    privacy, node = flower.Privacy(clip=0.2, noise=3.0), {"secure-least": 4}
    lie = letters_of(NODES[1], [0, 2, 3])
    config = {"secure": True, "outer-steps": 1, "wait": 0.3}
    error = run(task, tmp_path, config, lie=lie, privacy=privacy, node=node)
    # Without the liar there are fewer clients than the owners ask for: the run stops.
    assert "no secure sum came about in 0.3 s" in str(error)
    accounts = tmp_path / "states" / ".privacy"
    assert not (accounts / "client-0.json").exists()
    # The liar has opened the letters of the others, and has counted its own releases.
    assert json.loads((accounts / "client-1.json").read_text())["releases"] > 0


def test_a_server_that_passes_on_keys_of_its_own_gets_no_vector():
    """It replaced the keys of a round, and took the masks off with them: the letters name them."""
    sums, sealed = ready(4)
    own = {index: _masks.key_of(bytes([index]) * 31) for index in (1, 2, 3)}
    forged = {f"key:{i}": as_words(_masks.public_of(key)) for i, key in own.items()}
    asked = request(sealed, 0)
    assert sums[0].closed(1, asked) == ([], True)
    assert sums[0].closed(1, asked | forged) == ([1, 2, 3], False)
    with pytest.raises(ValueError, match="too few letters"):
        sums[0].masked(1, asked | forged, VALUES)
    # One forged key of four leaves three that vouch for each other; fewer are not enough.
    one = asked | {"key:1": forged["key:1"]}
    assert sums[0].closed(1, one) == ([1], True)
    sums[0].masked(1, one, VALUES)
    with pytest.raises(ValueError, match="at least 3 of those that it has letters from"):
        sums[0].shares(1, {0, 1, 2})
    given = sums[0].shares(1, {0, 1, 2, 3})
    assert set(given) == {"share:0", "share:2", "share:3"}


def test_the_owner_s_least_counts_opened_letters():
    sums, sealed = ready(4, Wish(True, 4))
    asked = request(sealed, 0)
    asked["seal:1"] = asked["seal:1"] ^ np.uint32(1)
    assert sums[0].closed(1, asked) == ([1], False)


@pytest.mark.parametrize("liars", [[0], [3, 11, 19, 30, 31, 32, 39]])
def test_wrong_shares_among_many_clients_are_found_out(liars):
    """With 40 clients groups of shares are too many to be tried: one liar ended the run."""
    secret = bytes(range(31))
    shares = _masks.split(secret, range(40), 21)
    for one in liars:
        shares[one] = bytes([shares[one][0] ^ 1]) + shares[one][1:]
    found = recovered(shares, 21, lambda made: made == secret)
    assert found == (secret, set(liars))
    # No more than that many can be told from the rest, and nothing wrong comes out.
    for one in range(4, 19):
        shares[one] = bytes(32)
    assert recovered(shares, 21, lambda made: made == secret) is None


@pytest.mark.parametrize("clients", [2, 3, 4, 5, 9])
def test_a_secret_comes_back_from_the_shares_that_are_right(clients):
    needed = clients // 2 + 1
    rng = np.random.default_rng(clients)
    for _ in range(5):
        secret = rng.bytes(31)
        shares = _masks.split(secret, range(clients), needed)
        wrong = set(rng.permutation(clients)[: clients - needed].tolist())
        given = {i: rng.bytes(32) if i in wrong else one for i, one in shares.items()}
        assert recovered(given, needed, lambda made, secret=secret: made == secret) == (
            secret,
            wrong,
        )
        few = {i: shares[i] for i in range(needed - 1)}
        assert recovered(few, needed, lambda made: True) is None


def test_a_client_that_is_gone_is_taken_out_though_some_lack_its_letter():
    sums, sealed = ready(5)
    asked = {i: request(sealed, i) for i in sums}
    asked[0]["seal:4"] = asked[0]["seal:4"] ^ np.uint32(1)
    arrived = [0, 1, 2, 3]
    masked = {i: sums[i].masked(1, asked[i], VALUES) for i in arrived}
    given = {
        i: {int(n[6:]): as_bytes(v) for n, v in sums[i].shares(1, set(arrived)).items()}
        for i in arrived
    }
    assert set(given[0]) == {0, 1, 2, 3}
    found = _unmask.unmasked("run", 1, begun(sealed), masked, given)
    np.testing.assert_allclose(found.total["y.0.1"], 4 * VALUES["y.0.1"], atol=1e-8)
