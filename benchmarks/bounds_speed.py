"""Seconds of an outer step on a simplex, beside those on the same equality without bounds.

    python benchmarks/bounds_speed.py [--entries 10000]

The lower level is a sum of squares over so many entries, half of which end at their bound. A step
is the median of many blocks of compiled steps. The sets take turns, block by block, so that other
work on the machine disturbs all of them alike; the ratio is the median of the ratios of neighbours.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import aipod

SOLVERS = {
    "AiPOD": aipod.AiPOD(upper_lr=1e-3),
    "E-AiPOD": aipod.EAiPOD(upper_lr=1e-3),
    "E3-AiPOD": aipod.E3AiPOD(upper_lr=1e-3),
}


def problem_on(lower_set: aipod.AbstractSet, entries: int) -> aipod.Bilevel:
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.uniform(0.5, 1.5, size=entries))
    target = jnp.asarray(rng.normal(size=entries)) / entries
    return aipod.Bilevel(
        lambda x, y, _: entries * jnp.sum((y - target) ** 2) + jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum(weights * (y - target - jnp.mean(x) / entries) ** 2),
        lower_set=lower_set,
    )


def block_of(
    solver: aipod.Alternating, problem: aipod.Bilevel, entries: int
) -> Callable[[], float]:
    """Makes so many steps, and returns the seconds of one."""
    key, steps = jax.random.key(0), 20

    @jax.jit
    def block(state: aipod.State) -> aipod.State:
        return jax.lax.scan(
            lambda s, _: (solver.traced_step(problem, s, key), None), state, None, length=steps
        )[0]

    first = solver.init(problem, jnp.ones(10), jnp.full(entries, 1 / entries))
    states = [jax.block_until_ready(block(first))]

    def timed() -> float:
        start = time.perf_counter()
        states[0] = jax.block_until_ready(block(states[0]))
        return (time.perf_counter() - start) / steps

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=100)
    arguments = parser.parse_args()
    entries = arguments.entries
    sets = {
        "Budget": aipod.Budget(1.0),
        "Simplex": aipod.Simplex(),
        "CappedSimplex": aipod.CappedSimplex(1.0, 3 / entries),
        "Box": aipod.Box(0.0, 3 / entries),
    }
    print(f"| solver | {' | '.join(sets)} | Simplex / Budget |")
    print("|---|" + "---|" * (len(sets) + 1))
    for name, solver in SOLVERS.items():
        blocks = [block_of(solver, problem_on(s, entries), entries) for s in sets.values()]
        found = np.array([[block() for block in blocks] for _ in range(arguments.blocks)])
        cells = " | ".join(f"{1e3 * seconds:.3f} ms" for seconds in np.median(found, axis=0))
        print(f"| {name} | {cells} | {np.median(found[:, 1] / found[:, 0]):.2f} |", flush=True)


if __name__ == "__main__":
    main()
