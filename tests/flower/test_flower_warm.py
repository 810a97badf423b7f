"""A node's app process that stays between two messages."""

import importlib
import os
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.exit.exit_handler import add_exit_handler
from flwr.supernode.runtime import run_clientapp as runtime

from aipod.flower import _warm
from aipod.flower._warm import AppEntry, Worker, warm_environment, write_command


@pytest.fixture
def place():
    """A folder with a short name; the command there, and one that stands for Flower's own."""
    with tempfile.TemporaryDirectory(prefix="aipod-") as folder:
        real = Path(folder) / "real"
        real.write_text('#!/bin/sh\necho "$@" >> "$0.said"\n')
        real.chmod(0o700)
        write_command(Path(folder), real)
        yield Path(folder)


def call(place, *words):
    return subprocess.Popen([place / "flwr-clientapp", *words])


def said(place):
    path = place / "real.said"
    return path.read_text().split() if path.exists() else []


def serving(place, entry, seconds=30.0):
    worker = Worker(place, entry)
    thread = threading.Thread(target=worker.serve, args=(["first"], seconds), daemon=True)
    thread.start()
    return thread


def test_messages_go_to_the_worker_and_a_second_one_at_once_to_flower(place):
    seen, begun, go_on = [], threading.Event(), threading.Event()

    def entry(words):
        seen.append(words)
        if words == ["slow"]:
            begun.set()
            go_on.wait(20)
        return words != ["last"]

    thread = serving(place, entry)
    assert call(place, "--token", "a b").wait(20) == 0
    slow = call(place, "slow")
    assert begun.wait(20)
    assert call(place, "meanwhile").wait(20) == 0
    assert said(place) == ["meanwhile"]
    go_on.set()
    assert slow.wait(20) == 0
    assert call(place, "last").wait(20) == 0
    thread.join(20)
    assert seen == [["first"], ["--token", "a b"], ["slow"], ["last"]]
    # It has ended, and whoever comes next would be the worker.
    assert not (place / "socket").exists()


def test_a_worker_that_nobody_needs_ends(place):
    thread = serving(place, lambda words: True, seconds=0.05)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(("words", "code"), [(b"t", 1), (b"", 0)], ids=["after", "before"])
def test_a_message_whose_worker_dies_is_not_handled_twice(place, words, code):
    """One that it had not taken is Flower's."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        process = call(place, "second")
        way, _ = listener.accept()
        with way:
            way.recv(100)
            way.sendall(words)
    assert process.wait(20) == code
    assert said(place) == [] if code else ["second"]


def test_the_command_is_private_and_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = warm_environment({"PATH": "/usr/bin"}, "me-")
    first, *rest = made["PATH"].split(os.pathsep)
    assert rest == ["/usr/bin"]
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o700
    for path in Path(first).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@pytest.fixture
def flower(monkeypatch):
    """Flower's command, which loads the app that its argument names; what it did."""
    done = []

    def stand_in():
        signal.signal(signal.SIGTERM, lambda *_: None)
        add_exit_handler(lambda: done.append("handler"))
        words = _warm.sys.argv[1:]
        try:
            done.append(runtime.get_load_client_app_fn()(words[0]))
        except LoadClientAppError:
            done.append("refused")
        runtime.flwr_exit(code=0, event_type=None)

    # By its name: the package has a function of the same name as the module.
    command = importlib.import_module("flwr.supernode.cli.flwr_clientapp")
    monkeypatch.setattr(command, "flwr_clientapp", stand_in)
    monkeypatch.setattr(runtime, "get_load_client_app_fn", lambda: lambda app: f"loads {app}")
    monkeypatch.setattr(runtime, "flwr_exit", runtime.flwr_exit)
    monkeypatch.setattr(_warm.sys, "argv", ["pytest"])
    monkeypatch.setattr(_warm, "run_ended", threading.Event())
    return done


def test_one_process_runs_flower_s_command_many_times(flower):
    entry, before = AppEntry(), signal.getsignal(signal.SIGTERM)
    assert entry(["one", "--parent-pid", "7"])
    assert _warm.sys.argv == ["flwr-clientapp", "one"]
    assert entry(["one"])
    assert flower == ["loads one", "handler"] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_app_with_other_code_is_never_mixed_with_the_first(flower):
    entry = AppEntry()
    assert entry(["one"])
    assert not entry(["two"])
    assert flower == ["loads one", "handler", "refused", "handler"]


def test_the_process_ends_with_the_run(flower):
    entry = AppEntry()
    _warm.run_ended.set()
    assert not entry(["one"])
