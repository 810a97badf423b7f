"""Clients whose data have different scales: how far the defaults get, and what helps.

    python benchmarks/unlike_clients.py            # a minute or two on 2 cores
    python benchmarks/unlike_clients.py --seeds 10 --steps 1500

Ridge regression with a penalty of its own, exp(x_i), on each of six unknowns, tuned on validation
data. The training data of each of 30 clients are multiplied by exp(s z), z normal: as if each
client measured in a unit of its own. A local step is as long as the client that bends most allows;
what the clients must agree on bends as their mean does. The column kappa is the largest curvature
of a client over the smallest of the mean, at the start.

The other columns have the share of the possible decrease of F that is reached, with y*(x) and F
solved for in closed form: the median over seeds and, in brackets, the worst seed. Below 0 is worse
than the start. The last line says whether runs that failed know it.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import aipod
from aipod import federated
from aipod.experiments.numbers import markdown

CLIENTS, TRAIN, VALIDATION, UNKNOWNS = 30, 8, 4, 6
START, SPREADS = -1.0, (0.0, 0.5, 1.0, 1.5, 2.0)
# A run that reaches less of the possible decrease, in per cent, has failed.
FAILED = 50
SOLVERS = {
    "E3-AiPOD": aipod.E3AiPOD(),
    "20 adjoint steps": aipod.E3AiPOD(adjoint_steps=20),
    "E-AiPOD": aipod.EAiPOD(),
    "FedNest": aipod.FedNest(),
}


class Case(NamedTuple):
    """A federation, F(x), its minimum, and kappa."""

    problem: aipod.Bilevel
    value: Callable[[Any], Any]
    least: float
    kappa: float


def lower(x, y, batch):
    return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def upper(x, y, batch):
    return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)


def case(spread: float, seed: int) -> Case:
    rng = np.random.default_rng([seed, 17])
    true = rng.normal(size=UNKNOWNS)

    def data(examples: int, scales: Any) -> tuple[np.ndarray, np.ndarray]:
        inputs = rng.normal(size=(CLIENTS, examples, UNKNOWNS))
        targets = inputs @ true + 0.3 * rng.normal(size=(CLIENTS, examples))
        return scales[:, None, None] * inputs, scales[:, None] * targets

    train = data(TRAIN, np.exp(spread * rng.normal(size=CLIENTS)))
    validation = data(VALIDATION, np.ones(CLIENTS))
    products = np.einsum("mij,mik->mjk", train[0], train[0]) / TRAIN
    right = np.einsum("mij,mi->j", *train) / (TRAIN * CLIENTS)
    rows, targets = validation[0].reshape(-1, UNKNOWNS), validation[1].reshape(-1)

    def value(x: Any) -> Any:
        y = jnp.linalg.solve(jnp.mean(products, axis=0) + jnp.diag(jnp.exp(x)), right)
        return 0.5 * jnp.mean((rows @ y - targets) ** 2)

    both = jax.jit(jax.value_and_grad(value))
    starts = (np.full(UNKNOWNS, START + shift) for shift in (-3.0, 0.0, 3.0))
    least = min(
        scipy.optimize.minimize(
            lambda x: [np.asarray(part, float) for part in both(x)], start, jac=True
        ).fun
        for start in starts
    )
    hessians = products + np.exp(START) * np.eye(UNKNOWNS)
    kappa = np.linalg.eigvalsh(hessians).max() / np.linalg.eigvalsh(hessians.mean(axis=0)).min()
    arrays = [tuple(map(jnp.asarray, part)) for part in (validation, train)]
    problem = federated.federate(upper, lower, *arrays, batch_size=None)
    return Case(problem, value, float(least), float(kappa))


def reached(
    solver: aipod.Alternating, one: Case, seed: int, steps: int
) -> tuple[float, bool | None]:
    """The share of the possible decrease of F, and whether the run says that it has converged."""
    x0, y0 = (federated.replicate(jnp.full(UNKNOWNS, start), CLIENTS) for start in (START, 0.0))
    solution = aipod.solve(
        one.problem, solver, x0, y0, steps, key=jax.random.key(seed), throw=False
    )
    first, last = (float(one.value(x[0])) for x in (x0, solution.x))
    return 100 * (first - last) / (first - one.least), solution.converged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    chosen = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    cases = {spread: [case(spread, seed) for seed in range(chosen.seeds)] for spread in SPREADS}
    # One solver after the other: its program then serves all seeds and scales.
    found = {
        (spread, name): [reached(solver, one, seed, chosen.steps) for seed, one in enumerate(ones)]
        for name, solver in SOLVERS.items()
        for spread, ones in cases.items()
    }
    rows = []
    for spread, ones in cases.items():
        kappas = [one.kappa for one in ones]
        cells = [
            f"{statistics.median(shares):.0f} % ({min(shares):.0f})"
            for shares in ([share for share, _ in found[spread, name]] for name in SOLVERS)
        ]
        rows.append([f"{spread:g}", f"{min(kappas):.0f} to {max(kappas):.0f}", *cells])
    print(markdown(["s", "kappa", *SOLVERS], rows))
    failed = [converged for runs in found.values() for share, converged in runs if share < FAILED]
    said = sum(converged is True for converged in failed)
    print(f"{len(failed)} runs end below {FAILED} %; {said} of them say that they have converged.")


if __name__ == "__main__":
    main()
