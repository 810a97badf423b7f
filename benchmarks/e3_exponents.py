"""How fast E3-AiPOD's mean squared hypergradient falls with the rounds, with its defaults.

    python benchmarks/e3_exponents.py

Ridge penalties x, one for each of 6 features, of a regression y with 8 unlike clients. The mean of
|grad F(x^k)|^2 over the first n rounds is fitted by a power of n, on the means over seeds; the
theorem of docs/e3-theory.md has 1 / n for plain steps without noise. Prints the exponent e of
rounds ~ error^-e with its 95 % interval (Student's t on the residuals), as `aipod rates` does.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aipod
from aipod.experiments.studies.exponents import fit
from aipod.federated import federate, replicate

CLIENTS, FEATURES, EXAMPLES = 8, 6, 40
ROUNDS = (30, 100, 300, 1000, 3000)
STILL = optax.sgd(1.0)
SOLVERS = {
    "plain steps, plain averages": aipod.E3AiPOD(
        upper_lr=0.3, lower_optimizer=STILL, adjoint_optimizer=STILL
    ),
    "plain steps, momentum": aipod.E3AiPOD(upper_lr=0.3),
    "defaults": aipod.E3AiPOD(),
}


def problem(batch_size: int | None) -> aipod.Bilevel:
    rng = np.random.default_rng(0)

    def data() -> tuple[np.ndarray, np.ndarray]:
        inputs = rng.normal(size=(CLIENTS, EXAMPLES, FEATURES))
        truth = rng.normal(size=(CLIENTS, FEATURES))
        noise = rng.normal(size=(CLIENTS, EXAMPLES))
        return inputs, np.einsum("mif,mf->mi", inputs, truth) + noise

    def misfit(y: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)

    return federate(
        lambda x, y, batch: misfit(y, batch) + 0.05 * jnp.sum(x**2),
        lambda x, y, batch: misfit(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        data(),
        data(),
        batch_size=batch_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    exact = problem(None)
    x0 = replicate(jnp.full(FEATURES, 2.0), CLIENTS)

    def record(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        return {"error": aipod.stationarity(exact, x, y)}

    for batch in (None, 8):
        made, seeds = problem(batch), 1 if batch is None else arguments.seeds
        for name, solver in SOLVERS.items():
            runs = [
                aipod.solve(
                    made,
                    solver,
                    x0,
                    0 * x0,
                    ROUNDS[-1],
                    key=jax.random.key(seed),
                    record=record,
                    every=1,
                ).history["error"]
                for seed in range(seeds)
            ]
            means = np.mean([[run[:n].mean() for n in ROUNDS] for run in runs], axis=0)
            found = fit(ROUNDS, 1 / means)
            noise = "no noise" if batch is None else f"batches of {batch}"
            errors = ", ".join(f"{n:,}: {m:.2g}" for n, m in zip(ROUNDS, means, strict=True))
            print(
                f"{noise}, {name}: {found.value:.2f} ({found.low:.2f} to {found.high:.2f}); "
                f"means over the first n rounds: {errors}",
                flush=True,
            )


if __name__ == "__main__":
    main()
