"""Outer steps per second against a plain NumPy loop of the same algorithm, and what `solve` adds.

    python benchmarks/speed.py            # n = 100 and n = 2000, float64
    python benchmarks/speed.py --single   # the same in float32, NumPy too
    python benchmarks/speed.py --quick    # n = 100 only

E-AiPOD on the paper's synthetic problem (S = 5, T = 2, p = 0.3, noise 0.1). The NumPy loop computes
every pseudo-inverse and projection matrix beforehand. All contestants run alternately, several
times, in one process; medians and ratios are printed. Times exclude compiling unless stated. They
are CPU time on one core, which other work on the machine changes little; on a quiet machine that
is the time on the clock.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl

import aipod
from aipod.experiments.tasks import synthetic

ALPHA, BETA, PROB, LOWER, UPPER = 0.02, 0.01, 0.3, 5, 2
KEY = jax.random.key(0)


def numpy_loop(data: synthetic.Matrices, steps: int, dtype: type) -> float:
    """The algorithm as one would write it in NumPy; returns seconds per outer step."""
    n = data.A.shape[1]
    rng = np.random.default_rng(0)
    pinv = np.linalg.pinv(data.A)
    tangent_y = (np.eye(n) - pinv @ data.A).astype(dtype)
    shift = (pinv @ data.H).astype(dtype)
    tangent_x = (np.eye(n) - np.linalg.pinv(data.B) @ data.B).astype(dtype)
    c, d = data.c.astype(dtype), data.d.astype(dtype)
    x, y, r = np.ones(n, dtype), np.ones(n, dtype), np.zeros(n, dtype)

    def noise() -> np.ndarray:
        return 0.1 * rng.standard_normal(n, dtype=dtype)

    def slope(x: np.ndarray, y: np.ndarray, direction: np.ndarray) -> np.ndarray:
        total = x + y
        return np.cos(c @ x + d @ y) * direction + 2 * total / (total @ total + 1) + noise()

    began = time.process_time()
    for _ in range(steps):
        anchor = -(shift @ x)
        for _ in range(LOWER):
            ahead = y - BETA * (y - x + noise() - r)
            if rng.random() < PROB:
                y = tangent_y @ (ahead - BETA / PROB * r) + anchor
                r = r + PROB / BETA * (y - ahead)
            else:
                y = ahead
        upper = slope(x, y, d)
        z = tangent_y @ upper
        w = z - shift.T @ (upper - z)
        moved = x
        for _ in range(UPPER):
            moved = moved - ALPHA * (slope(moved, y, c) + w)
        x = tangent_x @ moved
    return (time.process_time() - began) / steps


def contestants(n: int, dtype: type, steps: int) -> dict[str, Callable[[], float]]:
    options = synthetic.Options(dimension=n, lower_rank=n // 5, upper_rank=n // 5)
    data, problem = synthetic.matrices(options), synthetic.build(options).problem
    start = jnp.ones(n), jnp.ones(n)
    # grad_yy g = I: one term with eta = 1 is the whole Neumann series, in NumPy as here.
    solver = aipod.EAiPOD(
        upper_lr=ALPHA,
        lower_lr=BETA,
        lower_prob=PROB,
        lower_steps=LOWER,
        upper_steps=UPPER,
        adjoint_lr=1.0,
        adjoint_steps=1,
    )
    state = solver.init(problem, *start)

    @eqx.filter_jit
    def scan(problem, solver, state, key):
        def body(state, _):
            return solver.traced_step(problem, state, key), None

        return jax.lax.scan(body, state, None, length=steps)[0]

    def bare() -> float:
        began = time.process_time()
        jax.block_until_ready(scan(problem, solver, state, KEY))
        return (time.process_time() - began) / steps

    def called(count: int) -> float:
        began = time.process_time()
        aipod.solve(problem, solver, *start, count, key=KEY, every=max(1, steps // 100))
        return time.process_time() - began

    bare(), called(steps)  # compile
    return {
        "numpy": lambda: numpy_loop(data, max(20, steps // 20), dtype),
        "bare scan": bare,
        "aipod.solve": lambda: called(steps) / steps,
        # What every call costs before its first step: it traces the program anew.
        "one step": lambda: called(1),
    }


def race(n: int, dtype: type, steps: int, rounds: int) -> None:
    entries = contestants(n, dtype, steps)
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, run in entries.items():
            times[name].append(run())
    median = {name: statistics.median(values) for name, values in times.items()}
    fixed = median.pop("one step")
    print(f"n = {n}, {np.dtype(dtype).name}, {steps:,} outer steps, median of {rounds}:")
    for name, value in median.items():
        print(f"  {name:12s} {value * 1e6:10.1f} us per outer step")
    # Compare within a round, when the load of the machine is the same.
    pairs = zip(times["numpy"], times["aipod.solve"], strict=True)
    ratios = sorted(slow / fast for slow, fast in pairs)
    print(
        f"  aipod.solve is {statistics.median(ratios):.1f} times as fast as the NumPy loop "
        f"({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )
    rows = zip(times["aipod.solve"], times["bare scan"], times["one step"], strict=True)
    added = statistics.median((solve - call / steps) / bare - 1 for solve, bare, call in rows)
    print(f"  a call of solve costs {fixed:.2f} s, and adds {100 * added:+.1f} % to a bare scan\n")


FIRST = """
import time; began = time.perf_counter()
import jax, jax.numpy as jnp, aipod
from aipod.experiments.tasks import synthetic
imported = time.perf_counter()
problem = synthetic.build(synthetic.Options()).problem
solver = aipod.EAiPOD(upper_lr=0.02, lower_lr=0.01, upper_steps=2, adjoint_lr=1.0, adjoint_steps=1)
aipod.solve(problem, solver, jnp.ones(100), jnp.ones(100), 400, key=jax.random.key(0))
print(imported - began, time.perf_counter() - began)
"""

MEMORY = """
import resource, jax, jax.numpy as jnp, aipod
from aipod.experiments.tasks import synthetic
problem = synthetic.build(synthetic.Options()).problem
solver = aipod.EAiPOD(upper_lr=0.02, lower_lr=0.01, upper_steps=2, adjoint_lr=1.0, adjoint_steps=1)
peaks = []
for steps in (1_000, 10_000, 100_000):
    options = dict(key=jax.random.key(0), every=steps // 100)
    aipod.solve(problem, solver, jnp.ones(100), jnp.ones(100), steps, **options)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(*peaks)
"""


def fresh_process(code: str) -> list[float]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [float(word) for word in run.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="n = 100 only")
    parser.add_argument("--single", action="store_true", help="float32 in place of float64")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    threadpoolctl.threadpool_limits(1)  # of NumPy's matrix products
    jax.config.update("jax_enable_x64", not arguments.single)
    dtype = np.float32 if arguments.single else np.float64
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform}, {jax.local_device_count()} device(s)\n")
    race(100, dtype, 100_000, 5)
    if not arguments.quick:
        race(2000, dtype, 2000, 5)
    firsts = [fresh_process(FIRST) for _ in range(3)]
    imported, done = (statistics.median(column) for column in zip(*firsts, strict=True))
    print(f"first result in a new process: import {imported:.1f} s, 400 steps after {done:.1f} s")
    peaks = fresh_process(MEMORY)
    print("peak memory after 1e3, 1e4, 1e5 steps: " + ", ".join(f"{p:.0f} MB" for p in peaks))


if __name__ == "__main__":
    main()
