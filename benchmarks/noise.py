"""E3-AiPOD's defaults against E2-AiPOD with many step sizes, where gradients are mostly noise.

    python benchmarks/noise.py
    python benchmarks/noise.py --seeds 5 --steps 2000

The paper's synthetic problem with H = 0 and noise 0.1 on each of 100 entries. Prints, for each
solver, the rounds until the error, averaged over 20 outer steps, first falls below each level, and
the final error; medians over seeds. Rounds are counted as in a federation: E2-AiPOD projects y, its
adjoint and x one after the other; E3-AiPOD projects all three in one round per outer step.
"""

import argparse
import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod.experiments.base import Task
from aipod.experiments.numbers import number
from aipod.experiments.tasks import synthetic

LEVELS = (1.0, 0.5, 0.2, 0.1)
WINDOW = 20
UPPER, LOWER = (0.05, 0.02, 0.005), (0.05, 0.01)
# Steps, step size and probability of projecting in E2-AiPOD's adjoint; G = I.
ADJOINT = ((10, 0.2, 0.3), (2, 0.5, 1.0), (1, 1.0, 1.0))


def measure(task: Task, name: str, solver: aipod.Alternating, steps: int, seeds: int) -> None:
    reached: dict[float, list[float]] = {level: [] for level in LEVELS}
    last = []
    for seed in range(seeds):
        history = aipod.solve(
            task.problem,
            solver,
            task.x0,
            task.y0,
            steps,
            key=jax.random.key(seed),
            record=task.record,
            every=1,
        ).history
        together = solver.lower.deferred and solver.adjoint.deferred
        rounds = history["step"]
        if not together:
            kinds = ("lower_projections", "adjoint_projections", "upper_projections")
            rounds = sum(history[kind] for kind in kinds)
        error = np.convolve(history["error"], np.ones(WINDOW) / WINDOW, mode="valid")
        last.append(float(error[-1]))
        for level in LEVELS:
            below = np.flatnonzero(error < level)
            reached[level].append(float(rounds[below[0] + WINDOW - 1]) if below.size else np.inf)
    cells = (statistics.median(reached[level]) for level in LEVELS)
    words = (number(cell, 0) if np.isfinite(cell) else "-" for cell in cells)
    print(f"| {name} | {' | '.join(words)} | {statistics.median(last):.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    task = synthetic.build(synthetic.Options(coupled=False))
    print(f"| rounds to an error of | {' | '.join(map(str, LEVELS))} | at the end |")
    print("|---|" + "---|" * (len(LEVELS) + 1))
    measure(task, "E3-AiPOD, defaults", aipod.E3AiPOD(), chosen.steps, chosen.seeds)
    fading = aipod.E3AiPOD(upper_optimizer=aipod.fading_adam())
    measure(task, "E3-AiPOD, fading_adam", fading, chosen.steps, chosen.seeds)
    untempered = aipod.E3AiPOD(lower_lr=aipod.Curvature(tempered=False))
    measure(task, "E3-AiPOD, not tempered", untempered, chosen.steps, chosen.seeds)
    for alpha, beta, (terms, rho, q) in itertools.product(UPPER, LOWER, ADJOINT):
        # Arrays, so that all step sizes share one compiled program.
        solver = aipod.E2AiPOD(
            upper_lr=jnp.asarray(alpha),
            lower_lr=jnp.asarray(beta),
            adjoint_lr=jnp.asarray(rho),
            adjoint_prob=jnp.asarray(q),
            adjoint_steps=terms,
        )
        name = f"E2-AiPOD, alpha {alpha}, beta {beta}, N {terms}, rho {rho}, q {q}"
        measure(task, name, solver, chosen.steps, chosen.seeds)


if __name__ == "__main__":
    main()
