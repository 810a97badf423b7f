"""The federation on one machine: its keys, and that it ends its own processes and no others."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aipod.cli import main
from aipod.flower._federation import Federation
from aipod.flower._keys import make_certificates, make_node_key

# Starts a process in a session of its own, as Flower does, says which, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_certificates_hold_for_this_machine_and_keys_are_private(tmp_path):
    make_certificates(tmp_path)
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = serialization.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    assert key.public_key() == server.public_key()
    private, public = make_node_key(tmp_path, "node")
    loaded = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(loaded.curve, ec.SECP384R1)
    assert serialization.load_ssh_public_key(public.read_bytes()) == loaded.public_key()
    for path in (private, tmp_path / "server.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_down_ends_what_was_started_and_nothing_else(tmp_path):
    federation = Federation(tmp_path)
    federation._note(port=1, tls=False, nodes=1, mark="abc", processes=[])
    stranger = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    other = int(stranger.stdout.readline())
    try:
        process = federation._start("node-0", "python", "-c", PARENT)
        log = tmp_path / "node-0.log"
        deadline = time.monotonic() + 60
        while not log.read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(log.read_text())
        with pytest.raises(ValueError, match="a federation is running"):
            federation.up(1, tls=False)
        # As `aipod federation down` in another shell: it knows the folder alone.
        assert Federation(tmp_path).down() == ["node-0"]
        assert not running(process.pid)
        assert not running(child)
        assert running(stranger.pid)
        assert running(other)
        assert federation.down() == []
    finally:
        federation.down()
        os.kill(other, signal.SIGKILL)
        stranger.kill()
        stranger.communicate()


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["federation", "up", "--nodes", "0", "--dir", str(tmp_path)]) == 2
    assert "nodes must be at least 1" in capsys.readouterr().err
    assert main(["federation", "down", "--dir", str(tmp_path)]) == 0
    assert "nothing was running" in capsys.readouterr().err
