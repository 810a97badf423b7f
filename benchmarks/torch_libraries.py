"""Hyper-cleaning with aipod and with the PyTorch libraries for bilevel optimisation.

    pip install torch betty-ml torchopt boat-torch      # any of them; the rest is left out
    pip install git+https://github.com/prolearner/hypertorch
    python benchmarks/torch_libraries.py

A softmax regression (784 inputs, 10 classes) on 5,000 training examples, each with a weight
sigmoid(x_i) that the validation loss chooses. An outer step is ten gradient steps of y, a Neumann
series of ten terms, and one gradient step of x; batches of 256, single precision, the CPU.

First all libraries compute the hypergradient of the same batch, which must agree. Then each makes
outer steps with random batches, in turns, and the median of a step is printed: the CPU time, which
other work on the machine leaves alone, and the time on the clock. aipod's contains all of
`aipod.solve` but the compiling. BOAT uses one batch in a whole outer step; the others draw a new
one for each step of y, and aipod also for each term of the series.
"""

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from torch_rivals import (
    BATCH,
    CLASSES,
    EXAMPLES,
    INNER,
    INPUTS,
    LR,
    RIDGE,
    TERMS,
    UPPER_LR,
    Run,
    betty_run,
    boat_run,
    data,
    hypertorch_run,
    torchopt_run,
)


def aipod_run(fixed: bool) -> Run:
    import jax
    import jax.numpy as jnp
    import optax

    import aipod

    images, given, val_images, val_labels = data()

    def losses(y: Any, images: Any, labels: Any) -> Any:
        logits = images @ y["weight"].T + y["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean(losses(y, *batch))

    def lower(x: Any, y: Any, batch: Any) -> Any:
        images, labels, index = batch
        weighted = jnp.mean(jax.nn.sigmoid(x[index]) * losses(y, images, labels))
        return weighted + 0.5 * RIDGE * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))

    def sampler(*arrays: np.ndarray) -> Any:
        if fixed:
            return aipod.FullBatch(tuple(array[:BATCH] for array in arrays))
        return aipod.Minibatches(arrays, BATCH)

    problem = aipod.Bilevel(
        upper,
        lower,
        upper_samples=sampler(val_images, val_labels),
        lower_samples=sampler(images, given, np.arange(EXAMPLES)),
    )
    solver = aipod.Alternating(
        lower=aipod.ProjectedSGD(lr=LR, steps=INNER),
        adjoint=aipod.Neumann(TERMS, lr=LR),
        upper=aipod.EveryStep(lr=UPPER_LR),
    )
    x0 = jnp.zeros(EXAMPLES)
    y0 = {"weight": jnp.zeros((CLASSES, INPUTS)), "bias": jnp.zeros(CLASSES)}

    def run(steps: int) -> np.ndarray:
        return np.asarray(aipod.solve(problem, solver, x0, y0, steps, key=jax.random.key(0)).x)

    return run


# The name, the package and the module, and what makes a run of it.
LIBRARIES: dict[str, tuple[str, str, Callable[[bool], Run]]] = {
    "aipod": ("jax", "jax", aipod_run),
    "Betty": ("betty-ml", "betty", betty_run),
    "TorchOpt": ("torchopt", "torchopt", torchopt_run),
    "hypertorch": ("hypergrad", "hypergrad", hypertorch_run),
    "BOAT": ("boat-torch", "boat_torch", boat_run),
}


def restrict(cores: int) -> None:
    """The same cores for all libraries: threads of PyTorch that wait for each other ruin a time."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ["OMP_NUM_THREADS"] = str(cores)
    # Betty's and TorchOpt's words about themselves and about PyTorch's old names.
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="outer steps in a measurement")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each library")
    parser.add_argument("--cores", type=int, default=1, help="CPU cores for everybody")
    arguments = parser.parse_args()
    restrict(arguments.cores)
    found = {n: entry for n, entry in LIBRARIES.items() if importlib.util.find_spec(entry[1])}
    for name in LIBRARIES.keys() - found.keys():
        print(f"{name} is not installed and left out")
    print(f"{platform.machine()}, {arguments.cores} cores, Python {platform.python_version()}")

    first = {name: -make(True)(1) / UPPER_LR for name, (_, _, make) in found.items()}
    size = np.linalg.norm(first["aipod"])
    apart = {name: float(np.linalg.norm(g - first["aipod"]) / size) for name, g in first.items()}
    runs = {name: make(False) for name, (_, _, make) in found.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    waited: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(arguments.steps)  # compiles, and fills caches
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            began, used = time.perf_counter(), time.process_time()
            run(arguments.steps)
            times[name].append((time.process_time() - used) / arguments.steps)
            waited[name].append((time.perf_counter() - began) / arguments.steps)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("\n| library | version | apart | CPU ms | lowest to highest | wall ms | relative |")
    print("|---|---|---|---|---|---|---|")
    for name, (package, _, _) in found.items():
        version = f"{package} {importlib.metadata.version(package)}"
        spread = f"{1e3 * min(times[name]):.1f} to {1e3 * max(times[name]):.1f}"
        print(
            f"| {name} | {version} | {apart[name]:.0e} | {1e3 * medians[name]:.1f} | {spread} | "
            f"{1e3 * statistics.median(waited[name]):.1f} | "
            f"{medians[name] / medians['aipod']:.1f} |"
        )
    wrong = [name for name, distance in apart.items() if not distance < 1e-4]
    if wrong:
        print(f"another hypergradient than aipod's: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
