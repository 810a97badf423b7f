"""Finite sums: how many samples each method needs, on the problems of benchopt's benchmark_bilevel.

Re-implemented here: the quadratics that it calls `simulated`, with one sampled matrix of rank one
for each example, started at x = -2 and y = 0. Every method gets the same 36 pairs of step sizes and
three seeds. For each level of ||grad F||^2 the table has the fewest samples that some pair needs,
as the median over the seeds; and ||grad F||^2 at the end of the budget. A sample is one example in
one derivative: grad_y g, grad_yy g z, grad_xy g z, or both gradients of f.

    python benchmarks/finite_sums.py                # 1,024 + 1,024 examples, 100 + 100 unknowns
    python benchmarks/finite_sums.py --large        # 32,768 + 1,024, 100 + 10
    python benchmarks/finite_sums.py --time         # microseconds in a step, waited for
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import aipod

jax.config.update("jax_enable_x64", True)

SIZES = {"small": (1024, 1024, 100, 100), "large": (32768, 1024, 100, 10)}
BATCH = 64
LEVELS = (1e-2, 1e-3, 1e-10)
# The same for every method: lower steps, and upper steps in units of them.
STEPS = (0.1, 0.2, 0.25, 0.3, 0.35, 0.4)
RATIOS = (0.5, 0.85, 1.0, 1.2, 1.3, 2.0)


class Sum(NamedTuple):
    """(1/n) sum_i 1/2 (p_i'y)^2 + 1/2 (q_i'x)^2 + (a_i'x)(b_i'y) + c_i'y + d_i'x."""

    p: Any
    q: Any
    a: Any
    b: Any
    c: Any
    d: Any


class Quadratic(NamedTuple):
    """The mean of a `Sum`: its matrices and vectors."""

    yy: Any
    xx: Any
    xy: Any
    y: Any
    x: Any


def value(x: Any, y: Any, part: Sum) -> Any:
    """The mean over a batch."""
    square = 0.5 * (part.p @ y) ** 2 + 0.5 * (part.q @ x) ** 2 + (part.a @ x) * (part.b @ y)
    return jnp.mean(square + part.c @ y + part.d @ x)


def turned(key: Any, size: int) -> Any:
    """A random orthogonal matrix, that of a reflection."""
    return jnp.linalg.svd(jax.random.normal(key, (size, 1)))[0]


def made(key: Any, n: int, dim_y: int, dim_x: int, *, mu: float = 0.1, cross: float = 0.1) -> Sum:
    """Examples with mean matrices of eigenvalues in [mu, 1], and singular values in [mu, cross]."""
    keys = jax.random.split(key, 10)

    def half(where: Any, roots: Any) -> Any:
        frame = turned(where, len(roots))
        return frame @ jnp.diag(roots) @ frame.T

    of_y = half(keys[0], jnp.logspace(jnp.log10(mu) / 2, 0, dim_y))
    of_x = half(keys[2], jnp.r_[0, jnp.logspace(jnp.log10(mu) / 2, 0, dim_x - 1)])
    p = jax.random.normal(keys[1], (n, dim_y)) @ of_y
    q = jax.random.normal(keys[3], (n, dim_x)) @ of_x
    left, _, right = jnp.linalg.svd(jax.random.normal(keys[4], (dim_x, dim_y)))
    rank = min(dim_x, dim_y)
    values = jnp.logspace(jnp.log10(mu), jnp.log10(cross), rank)
    middle = jnp.zeros((dim_x, dim_y)).at[:rank, :rank].set(jnp.diag(values))
    noise = jax.random.normal(keys[5], (n, dim_y))
    a, b = noise @ middle.T @ left.T, noise @ right.T
    c, d = jax.random.normal(keys[6], (n, dim_y)), jax.random.normal(keys[7], (n, dim_x))
    return Sum(p, q, a, b, c, d)


def mean_of(part: Sum) -> Quadratic:
    n = part.p.shape[0]
    return Quadratic(
        part.p.T @ part.p / n,
        part.q.T @ part.q / n,
        part.a.T @ part.b / n,
        part.c.mean(0),
        part.d.mean(0),
    )


class Case(NamedTuple):
    """A problem, its start, and x -> ||grad F||^2."""

    upper: Sum
    lower: Sum
    x0: Any
    y0: Any
    measure: Callable[[Any], Any]
    batch: int = BATCH

    def problem(self, epochs: bool = True) -> aipod.Bilevel:
        def samples(part: Sum) -> Any:
            return aipod.Minibatches(part, self.batch, epochs=epochs)

        return aipod.Bilevel(
            value, value, upper_samples=samples(self.upper), lower_samples=samples(self.lower)
        )


def case(size: str, seed: int = 2442) -> Case:
    n, m, dim_y, dim_x = SIZES[size]
    first, second = jax.random.split(jax.random.PRNGKey(seed), 2)
    lower, upper = made(first, n, dim_y, dim_x), made(second, m, dim_y, dim_x)
    g, f = mean_of(lower), mean_of(upper)
    jacobian = -jnp.linalg.solve(g.yy, g.xy.T)
    offset = -jnp.linalg.solve(g.yy, g.y)

    def measure(x: Any) -> Any:
        y = offset + jacobian @ x
        slope = f.yy @ y + f.xy.T @ x + f.y
        return jnp.sum((f.xx @ x + f.xy @ y + f.x + jacobian.T @ slope) ** 2)

    return Case(upper, lower, -2.0 * jnp.ones(dim_x), jnp.zeros(dim_y), measure)


def curve(
    case_: Case, solver: Callable[[Any, Any], Any], epochs: bool, budget: int, rows: int
) -> Callable[..., Any]:
    """(lower step, upper step, key) -> samples and ||grad F||^2 in so many rows of a run."""
    problem, measure = case_.problem(epochs), case_.measure

    def run(lower: Any, upper: Any, key: Any) -> tuple[Any, Any]:
        targets = np.linspace(0, budget, rows)
        start = case_.x0, case_.y0
        return path(problem, solver(lower, upper), start, key, targets, lambda x, _: measure(x))

    return run


def path(
    problem: Any, solver: Any, start: Any, key: Any, targets: Any, measure: Callable[..., Any]
) -> tuple[Any, Any]:
    """Samples and measure(x, y) in the first states of a run with so many samples each."""

    def spent(state: Any) -> Any:
        return state.counts.upper_samples + state.counts.lower_samples

    def row(state: Any, target: Any) -> tuple[Any, Any]:
        state = jax.lax.while_loop(
            lambda s: spent(s) < target, lambda s: solver.traced_step(problem, s, key), state
        )
        return state, (spent(state), measure(state.x, state.y))

    return jax.lax.scan(row, solver.initial(problem, *start), jnp.asarray(targets))[1]


def inverse_root(first: Any) -> Callable[[Any], Any]:
    """SOBA's rule, first / sqrt(k + 1)."""
    return lambda step: first / jnp.sqrt(step + 1.0)


def ours(lower: Any, upper: Any) -> Any:
    """Two steps on y and on x for one on the adjoint."""
    return aipod.VRAiPOD(upper_lr=upper, lower_lr=lower, adjoint_lr=lower, upper_steps=2)


def one_each(lower: Any, upper: Any) -> Any:
    """One step on each of y, the adjoint and x."""
    return aipod.VRAiPOD(upper_lr=upper, lower_lr=lower, adjoint_lr=lower, lower_steps=1)


METHODS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "VR-AiPOD": (ours, True),
    "VR-AiPOD, 1 1 1": (one_each, True),
    "SABA": (lambda b, a: aipod.SABA(upper_lr=a, lower_lr=b, adjoint_lr=b), True),
    "SRBA": (lambda b, a: aipod.SRBA(upper_lr=a, lower_lr=b, adjoint_lr=b), True),
    "SVRB": (lambda b, a: aipod.SVRB(upper_lr=a, lower_lr=b, adjoint_lr=b), True),
    "SOBA": (
        lambda b, a: aipod.SOBA(
            upper_lr=inverse_root(a),
            lower_lr=inverse_root(b),
            adjoint_lr=inverse_root(b),
            shared=True,
        ),
        True,
    ),
    "SOBA, independent": (
        lambda b, a: aipod.SOBA(
            upper_lr=inverse_root(a), lower_lr=inverse_root(b), adjoint_lr=inverse_root(b)
        ),
        False,
    ),
}


def measured(
    case_: Case, name: str, budget: int, rows: int, seeds: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, float]]]:
    """Samples and values of all pairs of step sizes: arrays (pair, seed, row)."""
    solver, epochs = METHODS[name]
    pairs = [(step, step * ratio) for step in STEPS for ratio in RATIOS]
    run = curve(case_, solver, epochs, budget, rows)
    lower = jnp.asarray([b for b, _ in pairs for _ in range(seeds)])
    upper = jnp.asarray([a for _, a in pairs for _ in range(seeds)])
    keys = jnp.stack([jax.random.key(s) for _ in pairs for s in range(seeds)])
    samples, values = jax.jit(jax.vmap(run))(lower, upper, keys)
    shape = (len(pairs), seeds, rows)
    return np.asarray(samples).reshape(shape), np.asarray(values).reshape(shape), pairs


def first_below(samples: np.ndarray, values: np.ndarray, level: float) -> np.ndarray:
    """For each run the samples at its first row below a level; infinity for none."""
    below = values <= level
    first = below.argmax(-1)
    found = np.take_along_axis(samples, first[..., None], -1)[..., 0].astype(float)
    return np.where(below.any(-1), found, np.inf)


def table(case_: Case, names: list[str], budget: int, rows: int, seeds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        samples, values, pairs = measured(case_, name, budget, rows, seeds)
        values = np.where(np.isfinite(values), values, np.inf)
        line: dict[str, Any] = {}
        for level in LEVELS:
            needed = np.median(first_below(samples, values, level), axis=1)
            best = int(np.argmin(needed))
            line[f"{level:g}"] = (float(needed[best]), pairs[best])
        last = np.median(values[:, :, -1], axis=1)
        line["end"] = (float(last.min()), pairs[int(last.argmin())])
        found[name] = line
        cells = [f"{v[0]:9.3g} ({v[1][0]:.3g}, {v[1][1]:.3g})" for v in line.values()]
        print(f"{name:20s} " + "  ".join(cells), flush=True)
    return found


def microseconds(case_: Case, name: str, steps: int = 2000) -> float:
    """Of one step in a compiled loop, the best of five."""
    make, epochs = METHODS[name]
    solver, problem, key = make(0.1, 0.1), case_.problem(epochs), jax.random.key(0)

    @eqx.filter_jit
    def block(problem: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, s: solver.traced_step(problem, s, key), state)

    state = jax.block_until_ready(block(problem, solver.init(problem, case_.x0, case_.y0)))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        state = jax.block_until_ready(block(problem, state))
        best = min(best, time.perf_counter() - start)
    return best / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the problem of 32,768 examples")
    parser.add_argument("--time", action="store_true", help="measure the time of a step instead")
    parser.add_argument("--samples", type=int, help="the budget")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="some of the names")
    given = parser.parse_args()
    found = case("large" if given.large else "small")._replace(batch=given.batch)
    if given.time:
        for name in given.methods:
            print(f"{name:20s} {microseconds(found, name):8.1f} us", flush=True)
        return
    budget = given.samples or (2_000_000 if given.large else 4_000_000)
    table(found, given.methods, budget, max(budget // 2000, 2), given.seeds)


if __name__ == "__main__":
    main()
