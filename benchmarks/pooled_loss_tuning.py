"""What loss-tuning's network learns without federation and without a bilevel method.

    AIPOD_DATA=/folder/with/mnist python benchmarks/pooled_loss_tuning.py
    python benchmarks/pooled_loss_tuning.py --shifts 1 --ridges 0 1e-4 3e-4 1e-3 --averaged
    python benchmarks/pooled_loss_tuning.py --upper test

All clients' training examples in one place, Adam, batches of 100, the logits shifted by s times the
logarithm of the class frequencies while training (Menon et al., 2021: s = 1 is the shift for equal
classes). The best epoch is chosen by the test data itself, so it is more than anyone could reach in
earnest. It tells what the experiment's balanced accuracies can be compared with. The experiment has
no penalty on the network; `--ridges` adds one, and `--averaged` looks at an average of the weights
over some thousand steps. `--upper` tunes all scales and shifts as the experiment does, by E3-AiPOD
with batches of 500: on the validation data, or on the test data, which nobody has in earnest.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aipod
from aipod.experiments.config import resolve
from aipod.experiments.tasks import loss_tuning
from aipod.experiments.tasks.images import (
    class_accuracies,
    cross_entropy,
    deal,
    squared_norm,
)

# How much of the average of the weights stays in each step.
AVERAGE = 0.999


def pooled(seed: int):
    """(training, validation and test examples of all clients, x and y before training)."""
    given = {"experiment": "loss-tuning", "problem_seed": seed, "data": "mnist"}
    options = loss_tuning.Options(**resolve(given).options)
    clients = deal(options, lambda labels: loss_tuning.imbalanced(options, labels))
    parts = [
        tuple(jnp.concatenate([one[i] for one in part]) for i in (0, 1))
        for part in (clients.train, clients.validation)
    ]
    test = tuple(map(jnp.asarray, clients.test))
    return *parts, test, loss_tuning.start(options, clients.pixels, clients.classes)


def accuracy(y, test) -> jax.Array:
    """The balanced accuracy on the test data."""
    found = loss_tuning.logits(y, test[0])
    return jnp.mean(class_accuracies(found, test[1], found.shape[1]))


def curve(seed: int, shift: float, epochs: int, ridge: float, averaged: bool) -> list[float]:
    """The balanced test accuracy after each epoch."""
    (images, labels), _, test, (_, y) = pooled(seed)
    frequencies = jnp.log(jnp.bincount(labels) / len(labels))
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
        return carry, accuracy(carry[2], test)

    carry, found = (y, adam.init(y), y), []
    for key in jax.random.split(jax.random.key(seed), epochs):
        carry, reached = epoch(carry, key)
        found.append(float(reached))
    return found


def tuned(seed: int, upper_data: str, steps: int) -> list[float]:
    """The same where x, scales and shifts of all classes, is tuned on this data."""
    train, validation, test, start = pooled(seed)
    weights, data = loss_tuning.rarity(np.bincount(train[1])), validation
    if upper_data == "test":
        # Its classes are about equally common.
        weights, data = jnp.ones_like(weights), test

    def upper(x, y, batch):
        losses = cross_entropy(loss_tuning.logits(y, batch[0]), batch[1])
        return jnp.mean(weights[batch[1]] * losses)

    def lower(x, y, batch):
        return jnp.mean(cross_entropy(loss_tuning.tuned_logits(x, y, batch[0]), batch[1]))

    problem = aipod.Bilevel(
        upper,
        lower,
        upper_samples=aipod.Minibatches(data, 500),
        lower_samples=aipod.Minibatches(train, 500),
    )
    solution = aipod.solve(
        *(problem, aipod.E3AiPOD(), *start, steps),
        key=jax.random.key(seed),
        record=lambda x, y: {"accuracy": accuracy(y, test)},
        every=50,
    )
    return solution.history["accuracy"].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--shifts", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--ridges", type=float, nargs="+", default=[0.0])
    parser.add_argument("--averaged", action="store_true")
    parser.add_argument("--upper", choices=("validation", "test"))
    parser.add_argument("--steps", type=int, default=2000, help="with --upper")
    chosen = parser.parse_args()
    if chosen.upper:
        curves = [tuned(seed, chosen.upper, chosen.steps) for seed in range(chosen.seeds)]
        tell(f"x tuned on {chosen.upper} data, {chosen.steps} steps", curves)
        return
    for shift, ridge in itertools.product(chosen.shifts, chosen.ridges):
        how = (shift, chosen.epochs, ridge, chosen.averaged)
        curves = [curve(seed, *how) for seed in range(chosen.seeds)]
        tell(f"shift {shift:g}, ridge {ridge:g}", curves)


def tell(what: str, curves: list[list[float]]) -> None:
    """Prints the medians of the last and of the best accuracy."""
    last, best = (np.median([pick(one) for one in curves]) for pick in (lambda c: c[-1], max))
    print(f"{what}: last {100 * last:.2f} %, best {100 * best:.2f} %", flush=True)


if __name__ == "__main__":
    main()
