"""What a federation keeps on disk is for its owner alone, and lies where it seems to lie."""

import os
import stat
import sys
import time

import jax.numpy as jnp
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import federated, flower
from aipod.flower._account import FOLDER
from aipod.flower._client import Session
from aipod.flower._federation import Federation
from aipod.flower._keys import make_certificates, make_node_key
from aipod.flower._local import initial_state
from aipod.flower._parcel import Parcel
from aipod.flower._parts import shared_leaves
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper

E3 = aipod.E3AiPOD(upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, damping=0.0)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def everything(folder):
    """The modes of all files and of all folders inside a folder."""
    found = {True: set(), False: set()}
    for path in folder.rglob("*"):
        found[path.is_dir()].add(mode(path))
    return found[False], found[True]


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(scope="module")
def client():
    data = client_data(2, 6)
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=3)
    x0, y0 = (federated.replicate(jnp.full(3, v), 2) for v in (0.3, -0.2))
    return flower.client_of(problem, x0, y0, index=0)


def first_exchange(client):
    words = {"run": "abc", "seed": 1, "last": 3, "every": 1, "turn": 0, "step": -1, "reset": True}
    shared = shared_leaves(E3, initial_state(E3, client.x, client.y))
    return Parcel(words, {f"shared:{name}": value for name, value in shared.items()})


def test_a_client_s_states_and_its_secret_are_private(client, tmp_path, umask):
    session = Session(client, E3, tmp_path / "states", flower.Privacy(clip=0.1, noise=1.0))
    assert session.handle(Parcel({"run": "abc"})).words["step"] == -1
    reply = session.handle(first_exchange(client))
    assert reply.group("asked")
    files, folders = everything(tmp_path)
    assert (files, folders) == ({0o600}, {0o700})
    place = tmp_path / "states" / "abc" / "client-0"
    assert {path.suffix for path in place.iterdir()} == {".npz"}
    account = tmp_path / "states" / FOLDER / "client-0.json"
    # Also when they were made by an earlier version.
    for path in (place, account.parent, account, *place.glob("*.npz")):
        path.chmod(0o755)
    session = Session(client, E3, tmp_path / "states", flower.Privacy(clip=0.1, noise=1.0))
    session.handle(first_exchange(client))
    assert everything(tmp_path) == ({0o600}, {0o700})


def test_a_client_s_folder_that_is_a_link_is_refused(client, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "abc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link"):
        Session(client, E3, tmp_path / "states").handle(Parcel({"run": "abc"}))
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b'{"releases": -1, "spent": 0}', b'{"releases": 1, "spent": NaN}'],
)
def test_a_damaged_privacy_account_is_refused(client, tmp_path, content):
    """A crash between opening and writing must not forget what has been given away."""
    session = Session(client, E3, tmp_path, flower.Privacy(clip=0.1, noise=1.0))
    path = tmp_path / FOLDER / "client-0.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        session.handle(first_exchange(client))
    assert path.read_bytes() == content


def test_a_privacy_account_is_not_read_through_a_link(client, tmp_path):
    session = Session(client, E3, tmp_path, flower.Privacy(clip=0.1, noise=1.0))
    (tmp_path / "other").write_text('{"releases": 0, "spent": 0}')
    (tmp_path / FOLDER / "client-0.json").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="symbolic link"):
        session.handle(first_exchange(client))


def test_an_account_that_cannot_be_written_lets_nothing_out(client, tmp_path, monkeypatch):
    session = Session(client, E3, tmp_path, flower.Privacy(clip=0.1, noise=1.0))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        session.handle(first_exchange(client))
    assert not (tmp_path / FOLDER / "client-0.json").exists()


def test_keys_are_narrowed_and_links_are_replaced(tmp_path, umask):
    folder, target = tmp_path / "keys", tmp_path / "target"
    target.write_bytes(b"not yours")
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    (folder / "node").write_bytes(b"old")
    (folder / "node").chmod(0o644)
    (folder / "node.pub").symlink_to(target)
    make_node_key(folder, "node")
    make_certificates(folder / "certificates")
    assert everything(folder) == ({0o600}, {0o700})
    assert mode(folder) == 0o700
    assert not (folder / "node.pub").is_symlink()
    assert target.read_bytes() == b"not yours"


# What a process of a federation does: it says a word, and makes a file and a folder.
CHILD = """
import os, sys
print("said", flush=True)
open("link.db", "w").close()
os.mkdir("states")
os.rename("link.db", "made.db")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
def test_logs_records_and_what_the_processes_make_are_private(tmp_path, umask):
    federation = Federation(tmp_path / "federation")
    with pytest.raises(ValueError, match="nodes must be"):
        federation.up(0, tls=False)
    assert not federation.folder.exists()
    federation.folder.mkdir(mode=0o700)
    federation.folder.chmod(0o700)
    federation._note(port=1, tls=False, nodes=1, mark="abc", processes=[])
    log = federation.folder / "node-0.log"
    log.touch()
    log.chmod(0o644)
    try:
        federation._start("node-0", "python", "-c", CHILD)
        deadline = time.monotonic() + 60
        while not (federation.folder / "made.db").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        federation.down()
    assert log.read_text() == "said\n"
    assert everything(federation.folder) == ({0o600}, {0o700})


def test_a_log_that_is_a_link_is_refused(tmp_path):
    federation = Federation(tmp_path)
    federation._note(port=1, tls=False, nodes=1, mark="abc", processes=[])
    (tmp_path / "target").write_text("kept")
    (tmp_path / "node-0.log").symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match="symbolic link"):
        federation._start("node-0", "python", "-c", "print('spoiled')")
    assert (tmp_path / "target").read_text() == "kept"


def test_an_existing_key_of_a_node_is_narrowed_before_it_is_used(tmp_path, monkeypatch):
    federation = Federation(tmp_path, warm=False)
    federation._note(port=1, tls=True, nodes=1, mark="abc", processes=[])
    private, _ = make_node_key(tmp_path / "keys", "node-0")
    private.chmod(0o644)
    seen = []
    monkeypatch.setattr(federation, "_start", lambda *words, **how: seen.append(mode(private)))
    federation.start_node(0)
    assert seen == [0o600]
