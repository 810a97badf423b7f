"""What loss-tuning's network learns without federation and without a bilevel method.

    AIPOD_DATA=/folder/with/mnist python benchmarks/pooled_loss_tuning.py
    python benchmarks/pooled_loss_tuning.py --shifts 1 --ridges 0 1e-4 3e-4 1e-3 --averaged

All clients' training examples in one place, Adam, batches of 100, the logits shifted by s times the
logarithm of the class frequencies while training (Menon et al., 2021: s = 1 is the shift for equal
classes). The best epoch is chosen by the test data itself, so it is more than anyone could reach in
earnest. It tells what the experiment's balanced accuracies can be compared with. The experiment has
no penalty on the network; `--ridges` adds one, and `--averaged` looks at an average of the weights
over some thousand steps.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from aipod.experiments.config import resolve
from aipod.experiments.tasks import loss_tuning
from aipod.experiments.tasks.images import (
    class_accuracies,
    cross_entropy,
    deal,
    layer,
    squared_norm,
)

# How much of the average of the weights stays in each step.
AVERAGE = 0.999


def curve(seed: int, shift: float, epochs: int, ridge: float, averaged: bool) -> list[float]:
    """The balanced test accuracy after each epoch."""
    given = {"experiment": "loss-tuning", "problem_seed": seed, "data": "mnist"}
    options = loss_tuning.Options(**resolve(given).options)
    clients = deal(options, lambda labels: loss_tuning.imbalanced(options, labels))
    images, labels = (jnp.concatenate([part[i] for part in clients.train]) for i in (0, 1))
    frequencies = jnp.log(jnp.bincount(labels) / len(labels))
    rng = np.random.default_rng([seed, 1])
    sizes = (clients.pixels, options.hidden), (options.hidden, clients.classes)
    y = tuple(layer(rng, *size) for size in sizes)
    adam = optax.adam(1e-3)

    def step(carry, batch):
        y, state, shown = carry

        def loss(y):
            found = loss_tuning.logits(y, images[batch]) + shift * frequencies[None]
            return jnp.mean(cross_entropy(found, labels[batch])) + ridge * squared_norm(y)

        updates, state = adam.update(jax.grad(loss)(y), state)
        y = optax.apply_updates(y, updates)
        shown = optax.incremental_update(y, shown, 1 - AVERAGE if averaged else 1.0)
        return (y, state, shown), None

    @jax.jit
    def epoch(carry, key):
        order = jax.random.permutation(key, len(labels))
        carry, _ = jax.lax.scan(step, carry, order[: len(order) // 100 * 100].reshape(-1, 100))
        found = loss_tuning.logits(carry[2], jnp.asarray(clients.test.images))
        by_class = class_accuracies(found, jnp.asarray(clients.test.labels), clients.classes)
        return carry, jnp.mean(by_class)

    carry, found = (y, adam.init(y), y), []
    for key in jax.random.split(jax.random.key(seed), epochs):
        carry, accuracy = epoch(carry, key)
        found.append(float(accuracy))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--shifts", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--ridges", type=float, nargs="+", default=[0.0])
    parser.add_argument("--averaged", action="store_true")
    chosen = parser.parse_args()
    for shift, ridge in itertools.product(chosen.shifts, chosen.ridges):
        how = (shift, chosen.epochs, ridge, chosen.averaged)
        curves = [curve(seed, *how) for seed in range(chosen.seeds)]
        last, best = (np.median([pick(one) for one in curves]) for pick in (lambda c: c[-1], max))
        print(
            f"shift {shift:g}, ridge {ridge:g}: last {100 * last:.2f} %, "
            f"best epoch {100 * best:.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
