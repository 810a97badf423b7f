"""Two processes make one run together; one that dies ends the other, and the run goes on later."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CASE = Path(__file__).parent / "process_case.py"
# More steps than can be made before the kill.
LONG = 2_000_000


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(processes, folder, steps, out):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(CASE), *map(str, (index, processes, port, folder, steps, out))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]


def finished(runs):
    texts = [run.communicate(timeout=240)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs), "\n".join(texts)
    return texts


def last_step(folder):
    steps = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.npz"))
    return steps[-1] if steps else 0


def test_two_processes(tmp_path):
    together = tmp_path / "together"
    runs = started(2, str(together), LONG, tmp_path / "cut")
    deadline = time.monotonic() + 180
    while last_step(together) < 5:
        assert time.monotonic() < deadline
        assert all(run.poll() is None for run in runs), [run.communicate()[0] for run in runs]
        time.sleep(0.05)
    runs[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    text = runs[0].communicate(timeout=60)[0]
    assert time.monotonic() - killed < 60
    assert runs[0].returncode != 0
    # Only the first process prints; and it says why it ends.
    assert "step " in text
    assert "step " not in runs[1].communicate()[0]
    assert any(word in text.lower() for word in ("peer", "task", "connection")), text[-2000:]
    # On from there: with two processes again, and then on one of them alone.
    reached = last_step(together)
    finished(started(2, str(together), reached + 20, tmp_path / "two"))
    finished(started(1, str(together), reached + 40, tmp_path / "one"))
    finished(started(1, str(tmp_path / "alone"), reached + 40, tmp_path / "whole"))
    two = [np.load(tmp_path / f"two-{index}.npz") for index in range(2)]
    resumed, whole = np.load(tmp_path / "one-0.npz"), np.load(tmp_path / "whole-0.npz")
    for name in ("x", "y", "r"):
        np.testing.assert_array_equal(two[0][name], two[1][name])
        np.testing.assert_allclose(resumed[name], whole[name], atol=1e-12)
