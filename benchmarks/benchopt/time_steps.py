"""The time of a step of SOBA and SABA, benchmark_bilevel's and ours, on the same small oracles.

    python benchmarks/benchopt/time_steps.py path/to/benchmark_bilevel

Needs benchopt. Both run on the quadratics of `benchmarks/finite_sums.py` (1,024 examples, 100
unknowns at each level, batches of 64), 2,000 steps in one compiled loop, on one core, waited for.
Their loops and ours take turns. Shown are the best and the median of each, and the median of ours
over theirs, turn by turn, since other work on the machine makes loops slower.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# One core, before JAX starts its threads.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

STEPS, TURNS = 2000, 40


def sliced(part: Any) -> Any:
    """The objective as that benchmark's oracles are: of the start of a slice and a batch size."""
    import jax
    from finite_sums import Sum, value

    def objective(inner: Any, outer: Any, start: Any = 0, batch_size: int = 1) -> Any:
        batch = [jax.lax.dynamic_slice_in_dim(leaf, start, batch_size) for leaf in part]
        return value(outer, inner, Sum(*batch))

    return objective


def theirs(module: Any, case: Any) -> Any:
    """() -> None that makes STEPS steps of their solver and waits for them."""
    import jax

    solver = module.Solver.get_instance(step_size=0.1, outer_ratio=1.0, batch_size=case.batch)
    solver.run_once = lambda *_: None  # a warm-up that only benchopt itself can make
    solver.set_objective(
        f_inner=sliced(case.lower),
        f_outer=sliced(case.upper),
        n_inner_samples=case.lower.p.shape[0],
        n_outer_samples=case.upper.p.shape[0],
        inner_var0=case.y0,
        outer_var0=case.x0,
    )
    carry = solver.init()
    two = isinstance(carry, tuple)
    kept = [carry]

    def go() -> None:
        if two:
            memory, state = kept[0]
            kept[0] = solver.one_epoch(state, memory, STEPS)
        else:
            kept[0] = solver.one_epoch(kept[0], STEPS)
        jax.block_until_ready(kept[0])

    return go


def ours(case: Any, name: str) -> Any:
    """The same for ours."""
    import jax
    import numpy as np
    from finite_sums import METHODS

    make, epochs = METHODS[name]
    solver, problem, key = make(0.1, 0.1), case.problem(epochs), jax.random.key(0)

    @jax.jit
    def block(state: Any) -> Any:
        first, last = np.int32(0), np.int32(STEPS)
        return jax.lax.fori_loop(
            first, last, lambda _, s: solver.traced_step(problem, s, key), state
        )

    kept = [solver.init(problem, case.x0, case.y0)]

    def go() -> None:
        kept[0] = jax.block_until_ready(block(kept[0]))

    return go


def main() -> None:
    where = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(Path(__file__).parents[1]), str(where)]
    import importlib

    from finite_sums import case

    made = case("small")
    loops = {}
    for name in ("SOBA", "SABA"):
        loops[f"{name}, benchmark_bilevel"] = theirs(
            importlib.import_module(f"solvers.{name.lower()}"), made
        )
        loops[f"{name}, aipod"] = ours(made, name)
    for go in loops.values():
        go()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TURNS):
        for name, go in loops.items():
            start = time.process_time()
            go()
            times[name].append((time.process_time() - start) / STEPS * 1e6)
    for name, own in times.items():
        other = times[f"{name.split(',')[0]}, benchmark_bilevel"]
        ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
        best, middle = min(own), statistics.median(own)
        print(f"{name:25s} best {best:5.1f} us, median {middle:5.1f} us, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
