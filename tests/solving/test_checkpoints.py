"""Checkpoints under bad conditions: two runs, full disks, damaged files, odd types, interrupts."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.solving import CheckpointError, Checkpoints

KEY = jax.random.key(0)
ROOT = Path(__file__).parents[2]


def problem(scale=1.0):
    return aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * scale * jnp.sum((y - x) ** 2),
    )


SOLVER = aipod.EAiPOD(upper_lr=0.1, lower_lr=0.5)


def solve(folder, steps, *, resume=True, record=None, x0=None, every=1, **more):
    start = jnp.zeros(3) if x0 is None else x0
    return aipod.solve(
        problem(),
        SOLVER,
        start,
        jax.tree.map(jnp.zeros_like, start),
        steps,
        key=KEY,
        checkpoint=folder,
        resume=resume,
        record=record,
        every=every,
        **more,
    )


def files(folder):
    return sorted(p.name for p in folder.glob("step-*"))


def test_leaves_are_named_by_their_path(tmp_path):
    solve(tmp_path, 4)
    with np.load(tmp_path / "step-000000000004.npz", allow_pickle=False) as archive:
        assert {"state:.x", "state:.y", "state:.lower.correction", "header"} <= set(archive.files)


def test_two_runs_in_one_folder(tmp_path):
    """A process that holds the folder, and a second one that says so and leaves it alone."""
    script = """
import sys, time, jax
jax.config.update("jax_enable_x64", True)
from tests.solving.test_checkpoints import solve
from pathlib import Path
def wait(report):
    print("running", flush=True)
    time.sleep(60)
solve(Path(sys.argv[1]), 4, progress=wait)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "running"
        with pytest.raises(CheckpointError, match=r"another run is writing.*choose another folder"):
            solve(tmp_path, 4)
    finally:
        first.kill()
        first.communicate()
    # The lock ends with the process, also when it is killed.
    assert solve(tmp_path, 4).result is aipod.Result.completed


def test_a_full_disk_ends_with_the_solution_and_leaves_nothing_partial(tmp_path, monkeypatch):
    whole = solve(None, 30, resume=False)
    save = np.savez

    def full(file, **arrays):
        file.write(b"half of a file")
        raise OSError(errno.ENOSPC, "No space left on device")

    solve(tmp_path, 10)
    before = files(tmp_path)
    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(RuntimeWarning, match="not saved.*No space left"):
        solution = solve(tmp_path, 30)
    assert "No space left on device" in solution.message
    np.testing.assert_array_equal(solution.x, whole.x)
    assert files(tmp_path) == before
    monkeypatch.setattr(np, "savez", save)
    np.testing.assert_array_equal(solve(tmp_path, 30).x, whole.x)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_is_really_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.warns(RuntimeWarning, match="not saved"):
            solution = solve(tmp_path / "state", 5, x0=jnp.zeros(5000))
        assert solution.result is aipod.Result.completed
        assert files(tmp_path / "state") == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_bfloat16_states(tmp_path):
    x0 = jnp.zeros(3, jnp.bfloat16)
    solve(tmp_path, 5, x0=x0)
    resumed = solve(tmp_path, 9, x0=x0)
    assert resumed.x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(resumed.x, solve(None, 9, x0=x0, resume=False).x)


def rewrite(path, change):
    """The archive with its parsed header and its arrays changed."""
    with np.load(path, allow_pickle=False) as archive:
        content = {name: archive[name] for name in archive.files}
    header = json.loads(content.pop("header").tobytes())
    change(header, content)
    content["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **content)


def bad_header(path, text):
    with np.load(path, allow_pickle=False) as archive:
        content = {name: archive[name] for name in archive.files}
    np.savez(path, **(content | {"header": np.frombuffer(text, np.uint8)}))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def pickled(path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("evil.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': ")


DAMAGES = {
    "empty": lambda p: p.write_bytes(b""),
    "half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "zeros-at-the-end": lambda p: p.write_bytes(p.read_bytes()[:-200] + bytes(200)),
    "no-archive": lambda p: p.write_bytes(b"not a zip file" * 50),
    "flipped-byte": flip,
    "a-pickle-in-it": pickled,
    "a-plain-array": lambda p: p.write_bytes(np.lib.format.magic(1, 0)),
    "header-no-json": lambda p: bad_header(p, b"{"),
    "header-no-text": lambda p: bad_header(p, b"\xff\xfe"),
    "header-a-list": lambda p: bad_header(p, b"[1, 2]"),
    "header-incomplete": lambda p: bad_header(p, b'{"version": 2}'),
    "a-leaf-missing": lambda p: rewrite(p, lambda h, c: c.pop("state:.x")),
    "another-shape": lambda p: rewrite(p, lambda h, c: c.update({"state:.x": np.zeros(4)})),
    "another-type": lambda p: rewrite(p, lambda h, c: c.update({"state:.x": np.zeros(3, "f4")})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(damage, tmp_path):
    solve(tmp_path, 4)
    solve(tmp_path, 8)
    assert len(files(tmp_path)) == 2
    DAMAGES[damage](tmp_path / "step-000000000008.npz")
    np.testing.assert_array_equal(solve(tmp_path, 8).x, solve(None, 8, resume=False).x)


def test_only_damaged_checkpoints_are_no_reason_to_start_anew(tmp_path):
    solve(tmp_path, 4)
    (tmp_path / "step-000000000004.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: remove them"):
        solve(tmp_path, 8)


def test_the_older_format_is_refused_with_a_sentence(tmp_path):
    solve(tmp_path, 4)
    rewrite(tmp_path / "step-000000000004.npz", lambda header, _: header.update(version=1))
    with pytest.raises(CheckpointError, match=r"format 1, but this aipod reads format 2"):
        solve(tmp_path, 8)


def norm(x, y):
    return {"norm": jnp.sum(x**2)}


@pytest.mark.parametrize(
    "record",
    [
        None,
        lambda x, y: {"other": jnp.sum(x**2)},
        lambda x, y: norm(x, y) | {"more": 1.0},
        lambda x, y: {"norm": x**2},
    ],
    ids=["fewer", "renamed", "more", "reshaped"],
)
def test_other_columns_than_before_are_refused(record, tmp_path):
    solve(tmp_path, 4, record=norm)
    with pytest.raises(CheckpointError, match=r"other columns than when the run was saved"):
        solve(tmp_path, 8, record=record)
    assert len(solve(tmp_path, 8, record=norm).history["norm"]) == 8


@pytest.mark.parametrize("place", ["_price", "history", "report"])
def test_an_interrupt_in_the_middle_of_bookkeeping_leaves_whole_books(place, tmp_path, monkeypatch):
    from aipod.solving import _history, _ledger

    calls = []

    def interrupting(function):
        def called(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr("aipod.solving._run._CHUNK_SECONDS", 1e-9)
    more = {}
    if place == "_price":
        monkeypatch.setattr(_ledger.Price, "total", interrupting(_ledger.Price.total))
    elif place == "history":
        monkeypatch.setattr(_history.History, "extended", interrupting(_history.History.extended))
    else:
        more = {"progress": interrupting(lambda report: None)}
    cut = solve(tmp_path, 20, record=norm, **more)
    assert cut.result is aipod.Result.interrupted
    done = int(cut.state.step)
    assert cut.history["step"].tolist() == list(range(1, done + 1))
    assert cut.ledger.lower_samples == cut.history["lower_samples"][-1]
    monkeypatch.undo()
    resumed, whole = solve(tmp_path, 20, record=norm), solve(None, 20, record=norm, resume=False)
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert resumed.ledger == whole.ledger
    for name in whole.history:
        np.testing.assert_array_equal(resumed.history[name], whole.history[name])


@pytest.mark.slow
def test_kill_minus_nine_in_the_middle_of_writes(tmp_path):
    """50 kills of a process that does nothing but write checkpoints: one start serves many.

    The writer is forked from a warm process, so that each kill takes milliseconds.
    """
    like = aipod.EAiPOD(upper_lr=0.1, lower_lr=0.5).init(problem(), jnp.zeros(3), jnp.zeros(3))
    script = """
import os, signal, sys, time, jax, jax.numpy as jnp, numpy as np, random
jax.config.update("jax_enable_x64", True)
from tests.solving.test_checkpoints import SOLVER, problem
from aipod.solving import Checkpoints
import equinox as eqx
state = SOLVER.init(problem(), jnp.zeros(3), jnp.zeros(3))
state = jax.tree.map(np.asarray, state)
random.seed(0)
for round in range(50):
    child = os.fork()
    if child == 0:
        step = round * 1000
        while True:
            step += 1
            values = np.int32(step), np.full(3, float(step))
            named = eqx.tree_at(lambda s: (s.step, s.x), state, values)
            Checkpoints(sys.argv[1], {"run": "a"}).save(named, {"column": np.full(2000, step)}, {})
    time.sleep(random.uniform(0.005, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = Checkpoints(sys.argv[1], {"run": "a"}).load(state)
    if found is None:
        print(round, "none")
        continue
    step = int(found.state.step)
    assert (np.asarray(found.state.x) == step).all() and (found.columns["column"] == step).all()
    print(round, step)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert len(lines) == 50
    # Nothing is lost: once there was a checkpoint, there always is one, and never an older one.
    steps = [int(step) for _, step in lines if step != "none"]
    assert len(steps) >= 45
    assert steps == sorted(steps)
    found = Checkpoints(tmp_path, {"run": "a"}).load(jax.tree.map(np.asarray, like))
    assert found is not None
