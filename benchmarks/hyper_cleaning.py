"""MNIST hyper-cleaning with weights in [0, 1]: which training labels are wrong?

    AIPOD_DATA=/folder/with/mnist python benchmarks/hyper_cleaning.py --out cleaning.json
    ... --data digits     # the small data set that needs no files
    ... --figure weights.png     # draws the weights, where Matplotlib is installed

Of 20,000 training labels 50 % or 80 % are replaced by wrong ones; 5,000 clean examples make up the
upper level. The model is a softmax regression with a ridge. Both levels are deterministic (full
batches), so differences between methods are not noise. Test accuracies of the same model trained on
everything and on the right labels alone stand beside. `--lower-steps 1` shows what happens where
the lower level is not solved well.
"""

import argparse
import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aipod
from aipod.experiments.tasks import cleaning


def task_of(arguments: argparse.Namespace, corrupted: float) -> tuple[Any, ...]:
    """The problem on full batches, its data, and the training and test sets as arrays."""
    options = cleaning.Options(
        data=arguments.data,
        data_dir=os.environ.get("AIPOD_DATA"),
        corrupted=corrupted,
        validation=5000 if arguments.data == "mnist" else 200,
        ridge=arguments.ridge,
        weights="box",
        problem_seed=arguments.seed,
    )
    data = cleaning.mixture(options)
    parts = [
        tuple(jnp.asarray(part, float if part.ndim == 2 else None) for part in examples)
        for examples in (data.training, data.validation, data.test)
    ]
    training, validation, test = parts

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean(cleaning.losses(y, *batch))

    def lower(x: Any, y: Any, batch: Any) -> Any:
        # The mean over the weights, so that few trusted examples count as much as many.
        weighted = jnp.sum(x * cleaning.losses(y, *batch)) / (jnp.sum(x) + 1.0)
        return weighted + 0.5 * arguments.ridge * jnp.sum(y**2)

    problem = aipod.Bilevel(
        upper,
        lower,
        upper_set=aipod.Box(0.0, 1.0),
        upper_samples=aipod.FullBatch(validation),
        lower_samples=aipod.FullBatch(training),
    )
    return problem, data, training, test


def measured(arguments: argparse.Namespace, corrupted: float) -> dict[str, Any]:
    problem, data, training, test = task_of(arguments, corrupted)
    y0 = jnp.zeros((training[0].shape[1], data.classes))
    right = jnp.asarray(~data.wrong)

    @jax.jit
    def fitted(weights: Any) -> Any:
        """y*(weights), by L-BFGS."""
        optimizer = optax.lbfgs()

        def objective(y: Any) -> Any:
            return problem.lower(weights, y, training)

        def one(carry: tuple[Any, Any], _: Any) -> tuple[Any, None]:
            y, state = carry
            value, slope = optax.value_and_grad_from_state(objective)(y, state=state)
            change, state = optimizer.update(
                slope, state, y, value=value, grad=slope, value_fn=objective
            )
            return (optax.apply_updates(y, change), state), None

        return jax.lax.scan(one, (y0, optimizer.init(y0)), None, length=100)[0][0]

    def trained_on(weights: Any) -> float:
        return float(cleaning.accuracy(fitted(jnp.asarray(weights, float)), *test))

    solver = aipod.EAiPOD(
        upper_optimizer=optax.adam(optax.exponential_decay(0.05, 60, 0.5)),
        lower_steps=arguments.lower_steps,
        lower_prob=1.0,
        adjoint_steps=arguments.adjoint_steps,
    )
    x0 = jnp.full(len(data.truth), 0.5)
    start = time.perf_counter()
    solution = aipod.solve(
        problem, solver, x0, y0, steps=arguments.steps, key=jax.random.key(arguments.seed)
    )
    weights = np.asarray(solution.x)
    return {
        "data": arguments.data,
        "corrupted": corrupted,
        "seconds": time.perf_counter() - start,
        "everything": trained_on(np.ones(len(weights))),
        "right labels only": trained_on(right),
        "cleaned": float(cleaning.accuracy(solution.y, *test)),
        "cleaned, refitted": trained_on(weights),
        "auc": float(cleaning.area_under_curve(solution.x, right)),
        "right at 0": float(np.mean(weights[~data.wrong] == 0)),
        "right at 1": float(np.mean(weights[~data.wrong] == 1)),
        "wrong at 0": float(np.mean(weights[data.wrong] == 0)),
        "wrong at 1": float(np.mean(weights[data.wrong] == 1)),
        "histograms": {
            name: np.histogram(weights[chosen], 20, (0, 1))[0].tolist()
            for name, chosen in (("right", ~data.wrong), ("wrong", data.wrong))
        },
    }


def draw(runs: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, len(runs), figsize=(4.4 * len(runs), 3), squeeze=False)
    edges = np.linspace(0, 1, 21)
    for place, run in zip(places[0], runs, strict=True):
        for name, colour in (("right", "#0072B2"), ("wrong", "#D55E00")):
            heights = run["histograms"][name]
            place.stairs(heights, edges, fill=True, color=colour, alpha=0.7, label=f"{name} label")
        place.set(xlabel="weight", title=f"{100 * run['corrupted']:.0f} % of the labels wrong")
    places[0][0].set_ylabel("training examples")
    places[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("mnist", "digits"), default="mnist")
    parser.add_argument("--ridge", type=float, default=0.002)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lower-steps", type=int, default=20)
    parser.add_argument("--adjoint-steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    parser.add_argument("--figure")
    arguments = parser.parse_args()
    runs = []
    for corrupted in (0.5, 0.8):
        runs.append(measured(arguments, corrupted))
        shown = {k: v for k, v in runs[-1].items() if k != "histograms"}
        print(json.dumps(shown), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(runs, file, indent=1)
    if arguments.figure:
        draw(runs, arguments.figure)


if __name__ == "__main__":
    main()
