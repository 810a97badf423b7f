"""MNIST hyper-cleaning as in benchopt's benchmark_bilevel: half of the training labels are random.

20,000 training and 5,000 validation images, multinomial regression with a weight sigmoid(x_i) for
each training image, started at x = -2 and y = 0; the validation error after 2 million samples.

    python benchmarks/finite_sums_mnist.py DIRECTORY
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod

TRAIN, VALID, BATCH, BUDGET = 20_000, 5_000, 64, 2_000_000


def losses(y: Any, images: Any, labels: Any) -> Any:
    scores = images @ y
    own = jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - own


def lower(x: Any, y: Any, batch: Any) -> Any:
    images, labels, places = batch
    weights = jax.nn.sigmoid(x[places])
    return jnp.mean(weights * losses(y, images, labels)) + 0.2 * jnp.sum(y**2)


def upper(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean(losses(y, *batch))


def problem_of(directory: str, seed: int) -> tuple[aipod.Bilevel, Any]:
    """The problem, and y -> the validation error."""
    rng = np.random.default_rng(seed)
    images, labels = aipod.data.mnist(directory).train
    images, labels = np.asarray(images).reshape(len(labels), -1), np.asarray(labels)
    chosen = rng.permutation(len(labels))[: TRAIN + VALID]
    train, valid = chosen[:TRAIN], chosen[TRAIN:]
    wrong = rng.random(TRAIN) < 0.5
    noisy = np.where(wrong, rng.integers(0, 10, TRAIN), labels[train])
    mean, spread = images[train].mean(0), images[train].std(0)
    images = (images - mean) / np.where(spread > 0, spread, 1.0)
    given = (images[train].astype(np.float32), noisy.astype(np.int32), np.arange(TRAIN))
    checked = (images[valid].astype(np.float32), labels[valid].astype(np.int32))
    problem = aipod.Bilevel(
        upper,
        lower,
        upper_samples=aipod.Minibatches(checked, BATCH, epochs=True),
        lower_samples=aipod.Minibatches(given, BATCH, epochs=True),
    )
    return problem, lambda y: jnp.mean(jnp.argmax(checked[0] @ y, axis=1) != checked[1])


# A method, and how many batches a step of it has.
METHODS: dict[str, tuple[Callable[..., Any], int]] = {
    "SABA": (aipod.SABA, 4),
    "SOBA": (lambda **rates: aipod.SOBA(**rates, shared=True), 4),
    "VR-AiPOD": (aipod.VRAiPOD, 5),
    "VR-AiPOD, 1 1 1": (lambda **rates: aipod.VRAiPOD(**rates, lower_steps=1), 4),
    "VR-AiPOD, 2 1 2": (lambda **rates: aipod.VRAiPOD(**rates, upper_steps=2), 6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="with the four files of MNIST")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="some of the names")
    given = parser.parse_args()
    problem, error = problem_of(given.directory, given.seed)
    x0, y0 = jnp.full(TRAIN, -2.0), jnp.zeros((784, 10))
    for name in given.methods:
        make, batches = METHODS[name]
        for lower_lr, upper_lr in ((0.1, 100.0), (0.03, 100.0), (0.03, 300.0), (0.01, 1000.0)):
            solver = make(upper_lr=upper_lr, lower_lr=lower_lr, adjoint_lr=lower_lr)
            steps = BUDGET // (batches * BATCH)
            end = aipod.solve(
                problem, solver, x0, y0, steps=steps, key=jax.random.key(1), throw=False
            )
            shown = f"{name:15s} {lower_lr:5g} {upper_lr:6g}"
            print(f"{shown} {float(error(end.y)):.4f} {end.result.name}", flush=True)


if __name__ == "__main__":
    main()
