"""A mesh of eight devices gives what one device gives, and sends what a round sends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "mesh_cases.py"


@pytest.mark.parametrize("part", ["federations", "gossip", "batches"])
def test_eight_devices(part):
    # The number of devices is chosen before JAX starts: hence a process of its own.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, str(CASES), part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
