"""Seconds per outer step of the federated task on a CPU, and the share of matrix products.

    taskset -c 0 python benchmarks/federated_speed.py
    python benchmarks/federated_speed.py --devices 2
    python benchmarks/federated_speed.py --clients 5000 --examples 24 --batch-size 24

The first line is the paper's size (50 clients, 60,000 images, batches of 256) on one core. The
images are random numbers of MNIST's size, because the time does not depend on their content.
"""

import argparse
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod import federated
from aipod.experiments.solvers import make
from aipod.experiments.tasks.hyper_representation import EXPERIMENT, objectives
from aipod.experiments.tasks.images import layer

PIXELS, HIDDEN, CLASSES = 784, 200, 10


def federation(clients: int, train: int, validation: int, batch_size: int) -> aipod.Bilevel:
    """The task of `hyper-representation` on random images, of any size."""
    rng = np.random.default_rng(0)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        pixels = rng.normal(size=(clients, count, PIXELS)).astype(np.float32)
        return pixels, rng.integers(0, CLASSES, size=(clients, count)).astype(np.int32)

    return federated.federate(
        *objectives(ridge=0.05),
        images(validation),
        images(train),
        batch_size=batch_size,
    )


def products(clients: int, train: int, batch_size: int, lower: int, adjoint: int) -> float:
    """GFLOP of matrix products in one outer step of E-AiPOD, if no feature is computed twice.

    Features of all training images; forward and backward through the first layer for a batch of
    each level; and the head: 2 products a gradient, 4 a product with the Hessian.
    """
    first = 2 * PIXELS * HIDDEN
    head = 2 * HIDDEN * CLASSES
    images = train + 4 * batch_size
    heads = batch_size * (2 * lower + 4 * (adjoint - 1 + 4) + 8)
    return clients * (images * first + heads * head) / 1e9


def product_rate() -> float:
    """GFLOP/s of the task's largest matrix product alone, compiled as `solve` compiles."""
    from aipod.solving._compile import compile_lowered

    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(50, 960, PIXELS)), jnp.float32)
    b = jnp.asarray(rng.normal(size=(50, PIXELS, HIDDEN)), jnp.float32)
    product = compile_lowered(jax.jit(jnp.matmul).lower(a, b))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product(a, b).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * 50 * 960 * PIXELS * HIDDEN / min(seconds) / 1e9


def measure(
    solver: str,
    clients: int,
    examples: int,
    batch_size: int,
    steps: int,
    hidden: int,
    devices: int,
) -> None:
    mesh = None
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
        mesh = jax.make_mesh((devices,), ("clients",))
    train = round(0.8 * examples)
    problem = federation(clients, train, examples - train, batch_size)
    rng = np.random.default_rng(1)
    x0 = federated.replicate(layer(rng, PIXELS, hidden), 1)
    y0 = federated.replicate(layer(rng, hidden, CLASSES), 1)
    arguments: dict[str, Any] = dict(EXPERIMENT.arguments[solver])
    made = make(solver, arguments)
    key = jax.random.key(0)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        aipod.solve(problem, made, x0, y0, count, key=key, mesh=mesh)
        return time.perf_counter() - began

    first = seconds(1)
    # Subtract the first step, whose power iteration starts cold.
    paces = [(seconds(1 + steps) - seconds(1)) / steps for _ in range(3)]
    pace = float(np.median(paces))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    line = (
        f"{solver}, {clients} clients of {examples} images, batches of {batch_size}: "
        f"{pace:.3f} s a step (median of 3 runs of {steps}), first step with compiling "
        f"{first:.1f} s, peak memory {memory:.2f} GB"
    )
    if solver == "e-aipod" and hidden == HIDDEN:
        gflop = products(
            clients, train, batch_size, arguments["lower_steps"], arguments["adjoint_steps"]
        )
        rate = product_rate()
        line += (
            f"; {gflop:.1f} GFLOP of matrix products, {gflop / rate:.3f} s of it at the "
            f"{rate:.0f} GFLOP/s of one alone: {gflop / rate / pace:.0%}"
        )
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", default="e-aipod")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--examples", type=int, default=1200, help="images of each client")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=200, help="hidden units of the network")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices to spread over")
    chosen = parser.parse_args()
    measure(**vars(chosen))


if __name__ == "__main__":
    main()
