"""Seconds of an outer step on a simplex, beside those on the same equality without bounds.

    python benchmarks/bounds_speed.py [--entries 10000]

The lower level is a sum of squares over so many entries, half of which end at their bound. A step
is the quickest of several blocks of compiled steps, which other work on the machine disturbs least.
"""

import argparse
import time

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


def seconds_per_step(solver: aipod.Alternating, problem: aipod.Bilevel, entries: int) -> float:
    x, y = jnp.ones(10), jnp.full(entries, 1 / entries)
    key, steps, blocks = jax.random.key(0), 20, []

    @jax.jit
    def block(state: aipod.State) -> aipod.State:
        return jax.lax.scan(
            lambda s, _: (solver.traced_step(problem, s, key), None), state, None, length=steps
        )[0]

    state = jax.block_until_ready(block(solver.init(problem, x, y)))
    for _ in range(60):
        start = time.perf_counter()
        state = jax.block_until_ready(block(state))
        blocks.append((time.perf_counter() - start) / steps)
    return min(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    entries = parser.parse_args().entries
    sets = {
        "Budget": aipod.Budget(1.0),
        "Simplex": aipod.Simplex(),
        "CappedSimplex": aipod.CappedSimplex(1.0, 3 / entries),
        "Box": aipod.Box(0.0, 3 / entries),
    }
    print(f"| solver | {' | '.join(sets)} | Simplex / Budget |")
    print("|---|" + "---|" * (len(sets) + 1))
    for name, solver in SOLVERS.items():
        found = [seconds_per_step(solver, problem_on(s, entries), entries) for s in sets.values()]
        cells = " | ".join(f"{1e3 * seconds:.3f} ms" for seconds in found)
        print(f"| {name} | {cells} | {found[1] / found[0]:.2f} |")


if __name__ == "__main__":
    main()
