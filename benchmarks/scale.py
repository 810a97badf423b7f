"""Time and memory of an outer step against the number of clients.

    python benchmarks/scale.py                                     # one GPU: up to 100,000 clients
    python benchmarks/scale.py --clients 500 5000 --steps 10       # two cores
    python benchmarks/scale.py --clients 5000 --participation 1 0.05
    python benchmarks/scale.py --clients 1000 --participation 0.05 --memory --steps 20

Every line is a process of its own, so that its peak of memory is its own: the device's where JAX
tells it, else that of the process. The task is hyper-representation with a 784-200-10 network and
24 images a client. The images are random numbers, because the time does not depend on their
content. Seconds are those of the whole chunk over its steps, after one chunk that compiles.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod import federated
from aipod.experiments.solvers import make
from aipod.experiments.tasks.hyper_representation import objectives
from aipod.experiments.tasks.images import layer

PIXELS, CLASSES = 784, 10


def federation(
    clients: int, examples: int, batch_size: int, participation: float, devices: int
) -> tuple[aipod.Bilevel, jax.sharding.Mesh | None]:
    """The task on random images that are made on the device."""
    # Two thirds for training.
    train = 2 * examples // 3
    mesh = None
    if devices > 1:
        # Has an effect on a CPU alone.
        jax.config.update("jax_num_cpu_devices", devices)
        mesh = jax.make_mesh((devices,), ("clients",))

    def images(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        pixels, labels = jax.random.split(key)
        shape = (clients, count)
        return (
            jax.random.uniform(pixels, (*shape, PIXELS), jnp.float32),
            jax.random.randint(labels, shape, 0, CLASSES),
        )

    keys = jax.random.split(jax.random.key(0))
    problem = federated.federate(
        *objectives(ridge=0.05),
        images(keys[0], examples - train),
        images(keys[1], train),
        batch_size=batch_size or None,
        participation=participation,
    )
    return problem, mesh


def measure(
    solver: str,
    clients: int,
    *,
    examples: int,
    batch_size: int,
    hidden: int,
    participation: float,
    devices: int,
    steps: int,
    memory: bool = False,
) -> dict[str, float]:
    problem, mesh = federation(clients, examples, batch_size, participation, devices)
    rng = np.random.default_rng(1)
    # One row for all clients: `solve` takes that too.
    x0 = federated.replicate(layer(rng, PIXELS, hidden), 1)
    y0 = federated.replicate(layer(rng, hidden, CLASSES), 1)
    reports: list[tuple[int, float]] = []

    def note(progress: Any) -> None:
        reports.append((progress.step, progress.seconds))

    options = {} if mesh is None else {"mesh": mesh}
    began = time.perf_counter()
    aipod.solve(
        problem,
        make(solver, {"memory": True} if memory else {}),
        x0,
        y0,
        steps=steps,
        key=jax.random.key(2),
        progress=note,
        **options,
    )
    whole = time.perf_counter() - began
    # The first chunk is one step, and is slower than the rest.
    first, last = reports[0], reports[-1]
    each = (last[1] - first[1]) / max(last[0] - first[0], 1)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"ms": 1e3 * each, "gigabytes": peak / 1e9, "seconds": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", default="e3-aipod")
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 5_000, 10_000, 100_000])
    parser.add_argument("--participation", type=float, nargs="+", default=[1.0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=0, help="0: all examples of a client")
    parser.add_argument("--hidden", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--memory", action="store_true", help="clients remember directions of x")
    parser.add_argument("--one", action="store_true", help="measure in this process, print JSON")
    given = parser.parse_args()
    if given.one:
        found = measure(
            given.solver,
            given.clients[0],
            examples=given.examples,
            batch_size=given.batch_size,
            hidden=given.hidden,
            participation=given.participation[0],
            devices=given.devices[0],
            steps=given.steps,
            memory=given.memory,
        )
        print(json.dumps(found))
        return
    print(f"{'clients':>8} {'share':>6} {'devices':>7} {'ms a step':>10} {'peak GB':>8}")
    for clients in given.clients:
        for share in given.participation:
            for devices in given.devices:
                command = [sys.executable, __file__, "--one", "--solver", given.solver]
                command += ["--clients", str(clients), "--participation", str(share)]
                command += ["--devices", str(devices), "--examples", str(given.examples)]
                command += ["--hidden", str(given.hidden), "--steps", str(given.steps)]
                command += ["--batch-size", str(given.batch_size)]
                command += ["--memory"] if given.memory else []
                done = subprocess.run(command, capture_output=True, text=True)
                line = f"{clients:8,} {share:6g} {devices:7}"
                if done.returncode:
                    print(f"{line} failed: {done.stderr.strip().splitlines()[-1][:100]}")
                    continue
                found = json.loads(done.stdout.strip().splitlines()[-1])
                print(f"{line} {found['ms']:10.2f} {found['gigabytes']:8.2f}", flush=True)


if __name__ == "__main__":
    main()
