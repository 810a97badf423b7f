"""Finite sums on a problem that no default was chosen on: a ridge for each pixel of the digits.

Logistic regression, even against odd, on the 1,438 training images of scikit-learn's digits: 958
for the lower level, with a ridge exp(x_p) on the weight of pixel p, and 480 for the upper level,
which also pulls x to 0. Pixels are neither centred nor scaled, so the lower level has a condition
number of some hundreds; some pixels are always blank. Batches of 32, the last one smaller. Every
method gets the same 25 pairs of step sizes and three seeds; VR-AiPOD is also run without any.

    python benchmarks/finite_sums_digits.py

For each level of ||grad F||^2 the table has the fewest samples that some pair needs, as the median
over the seeds, and the time of so many steps of that method, waited for, on one core.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from finite_sums import first_below, inverse_root, path

import aipod

BATCH, BUDGET, ROWS, PULL = 32, 1_000_000, 120, 1e-3
LEVELS = (1e-4, 1e-6, 1e-10)
LOWER, UPPER = (0.1, 0.2, 0.3, 0.45, 0.65), (3.0, 10.0, 20.0, 40.0, 80.0)


def logistic(y: Any, batch: Any) -> Any:
    images, signs = batch
    return jnp.mean(jax.nn.softplus(-signs * (images @ y)))


def lower(x: Any, y: Any, batch: Any) -> Any:
    return logistic(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def upper(x: Any, y: Any, batch: Any) -> Any:
    return logistic(y, batch) + PULL * jnp.sum(x**2)


def made() -> tuple[aipod.Bilevel, Callable[[Any, Any], Any]]:
    """The problem, and (x, y) -> ||grad F(x)||^2, by Newton's method from y."""
    images, labels = aipod.data.digits().train
    signs = np.where(labels % 2 == 0, 1.0, -1.0)
    cut = 2 * len(images) // 3
    train = jnp.asarray(images[:cut], float), jnp.asarray(signs[:cut])
    valid = jnp.asarray(images[cut:], float), jnp.asarray(signs[cut:])

    def hessian(x: Any, y: Any) -> Any:
        share = jax.nn.sigmoid(train[0] @ y)
        weighed = (share * (1 - share))[:, None] * train[0]
        return train[0].T @ weighed / cut + jnp.diag(jnp.exp(x))

    def measure(x: Any, y: Any) -> Any:
        for _ in range(6):
            y = y - jnp.linalg.solve(hessian(x, y), jax.grad(lower, 1)(x, y, train))
        z = jnp.linalg.solve(hessian(x, y), jax.grad(upper, 1)(x, y, valid))
        return jnp.sum((2 * PULL * x - jnp.exp(x) * y * z) ** 2)

    def samples(part: Any) -> Any:
        return aipod.Minibatches(part, BATCH, epochs=True)

    problem = aipod.Bilevel(
        upper, lower, upper_samples=samples(valid), lower_samples=samples(train)
    )
    return problem, measure


def _of(solver: Any, **more: Any) -> Callable[[Any, Any], Any]:
    return lambda b, a: solver(upper_lr=a, lower_lr=b, adjoint_lr=b, **more)


METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "VR-AiPOD": _of(aipod.VRAiPOD),
    "VR-AiPOD, 1 1 1": _of(aipod.VRAiPOD, lower_steps=1),
    "VR-AiPOD, 2 1 2": _of(aipod.VRAiPOD, upper_steps=2),
    "SABA": _of(aipod.SABA),
    "SRBA": _of(aipod.SRBA),
    "SOBA": lambda b, a: aipod.SOBA(
        upper_lr=inverse_root(a),
        lower_lr=inverse_root(b),
        adjoint_lr=inverse_root(b),
        shared=True,
    ),
    "VR-AiPOD, no step size given": lambda b, a: aipod.VRAiPOD(),
}


def start() -> tuple[Any, Any]:
    return jnp.full(64, -4.0), jnp.zeros(64)


def curve(problem: Any, measure: Any, solver: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """(lower step, upper step, key) -> samples and ||grad F||^2 in the rows of a run."""
    targets = np.geomspace(BUDGET / 500, BUDGET, ROWS)

    def run(b: Any, a: Any, key: Any) -> tuple[Any, Any]:
        return path(problem, solver(b, a), start(), key, targets, measure)

    return run


def microseconds(
    problem: Any, names: list[str], steps: int = 500
) -> dict[str, tuple[float, float]]:
    """Of one step of each method in a compiled loop, the best of many turns; and its samples."""
    key = jax.random.key(0)

    def loop(solver: Any) -> Callable[[Any], Any]:
        def block(state: Any) -> Any:
            return jax.lax.fori_loop(
                0, steps, lambda _, s: solver.traced_step(problem, s, key), state
            )

        return jax.jit(block)

    best, loops, found = {}, {}, {}
    for name in names:
        solver = METHODS[name](0.05, 1.0)
        loops[name], best[name] = loop(solver), float("inf")
        state = jax.block_until_ready(loops[name](solver.init(problem, *start())))
        samples = float(state.counts.upper_samples + state.counts.lower_samples)
        found[name] = state, samples / steps
    for _ in range(60):
        for name, block in loops.items():
            begun = time.process_time()
            jax.block_until_ready(block(found[name][0]))
            best[name] = min(best[name], time.process_time() - begun)
    return {name: (best[name] / steps * 1e6, found[name][1]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="some of the names")
    parser.add_argument("--time", action="store_true", help="measure the time of a step alone")
    given = parser.parse_args()
    problem, measure = made()
    times = microseconds(problem, given.methods)
    if given.time:
        for name, (each, one) in times.items():
            print(f"{name:30s} {each:5.1f} us, {one:5.0f} samples")
        return
    for name in given.methods:
        pairs = [(b, a) for b in LOWER for a in UPPER]
        if name.endswith("given"):
            pairs = pairs[:1]
        all_pairs = np.repeat(np.asarray(pairs), given.seeds, axis=0)
        keys = jnp.stack([jax.random.key(s) for _ in pairs for s in range(given.seeds)])
        run = jax.jit(jax.vmap(curve(problem, measure, METHODS[name])))
        samples, values = (np.asarray(part) for part in run(*all_pairs.T, keys))
        values = np.where(np.isfinite(values), values, np.inf)
        cells = []
        each, one = times[name]
        for level in LEVELS:
            needed = first_below(samples, values, level).reshape(len(pairs), -1)
            found = np.median(needed, axis=1)
            best = int(np.argmin(found))
            taken = found[best] / one * each * 1e-3
            cells.append(f"{found[best] / 1e3:5.0f} k {taken:5.1f} ms {pairs[best]}")
        last = np.median(values[:, -1].reshape(len(pairs), -1), axis=1).min()
        print(f"{name:30s} {each:5.1f} us  " + "  ".join(cells) + f"  end {last:.0e}", flush=True)


if __name__ == "__main__":
    # One core, before JAX starts its threads.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # Double precision, for the last digits.
    jax.config.update("jax_enable_x64", True)
    main()
