"""More attacks on a federation: silence, and a server that asks for other things than it should."""

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aipod.flower import _masks
from aipod.flower._masks import PRIME
from tests.flower.flower_grid import InProcessGrid
from tests.flower.test_flower import checkpoint
from tests.flower.test_flower_hostile import (
    HONEST,
    _eager,  # noqa: F401
    is_exchange,
    log,  # noqa: F401
    serve,
)
from tests.flower.test_flower_secure import _folder, public, ready  # noqa: F401

SILENT = HONEST[2]


@pytest.fixture
def asked(monkeypatch):
    """Node 102 greets, and never answers anything else; the requests that it got."""
    found, push = [], InProcessGrid.push_messages

    def silent(grid, messages):
        messages = list(messages)
        tickets = push(grid, messages)
        for message, ticket in zip(messages, tickets, strict=True):
            if message.metadata.dst_node_id == SILENT and is_exchange(message):
                found.append(message)
                del grid.replies[ticket]
        return tickets

    monkeypatch.setattr(InProcessGrid, "push_messages", silent)
    return found


def test_a_client_that_never_answers_is_asked_less_and_less(ridge, tmp_path, log, asked):  # noqa: F811
    """It made every outer step take the whole timeout, for as long as the run was."""
    config = {"outer-steps": 30, "min-nodes": 2, "round-timeout": 0.3}
    assert serve(ridge, tmp_path, config) is None
    assert checkpoint(tmp_path)[0]["history:step"].tolist() == list(range(1, 31))
    assert 2 <= len(asked) <= 5
    assert any("client 2 is not asked for 1.2 s, unless it is needed" in line for line in log)


def test_a_silent_client_that_is_needed_is_asked_again(ridge, tmp_path, log, asked):  # noqa: F811
    config = {"outer-steps": 2, "round-timeout": 0.3, "wait": 3.0}
    error = serve(ridge, tmp_path, config)
    assert "only 2 of at least 3 clients" in str(error)
    assert len(asked) > 3


@pytest.mark.parametrize("place", [-1, PRIME - 1, PRIME, 2**31])
def test_a_server_gets_no_share_at_the_place_of_the_secret(place):
    """A client named -1 was sent both secrets of a round whole, and so was one named p - 1."""
    sums, _ = ready(3)
    invented = _masks.public_of(X25519PrivateKey.generate())
    with pytest.raises(ValueError, match="has an index that is none"):
        sums[0].begin(2, public(sums) | {place: invented})


def test_one_client_cannot_stand_for_several():
    sums, _ = ready(3)
    with pytest.raises(ValueError, match="two clients of a secure sum have the same key"):
        sums[0].begin(2, public(sums) | {3: sums[1].public})
