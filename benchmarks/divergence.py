"""Steps that follow the curvature, where the curvature is hard to follow.

    python benchmarks/divergence.py                    # everything: 3 to 5 minutes on 2 cores
    python benchmarks/divergence.py --only growing,jumps --variants 5
    python benchmarks/divergence.py --json benchmarks/results/divergence.json
    python benchmarks/divergence.py --docs benchmarks/results/divergence.json  # onto the page

Three kinds of problems on which `aipod.Curvature` could underestimate what it meets:

- growing, rotated: 1/2 sum exp(rate x_i) (z_i - 1)^2 with z = Q y, while x grows; Q is the identity
  or a rotation. 20 variants.
- ridge regression with batches of 1, 2 and 8, and normal or Student's t(4) features. 30 seeds. The
  log-penalty x starts at -2, far from its solution, and y at 0; in the kinds `away` y starts at
  random, and in the kinds `near` x starts near its solution, so that noise alone is left.
- jumps: five clients whose curvatures exp(s x) jump by different factors. 20 variants.

The error is f(x, y) - F* on all data, at the end as a share of that at the start. For each solver
the table counts divergences (an error that is not finite or above 1e3), and compares the median
error with that of the best fixed lower step of a grid, chosen in hindsight for the kind and the
solver. Errors below 1e-8 count as 1e-8. The last column is the same ratio for gradient descent on F
itself, with y*(x) and its derivative solved for on all data, where that has a closed form.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod import federated
from aipod._misc.files import write_between_marks, write_text
from aipod.experiments.numbers import markdown
from aipod.problem import FullBatch, Minibatches

SOLVERS: dict[str, Callable[..., aipod.Alternating]] = {
    "AiPOD": aipod.AiPOD,
    "E-AiPOD": aipod.EAiPOD,
    "E2-AiPOD": aipod.E2AiPOD,
    "E3-AiPOD": aipod.E3AiPOD,
}
RIDGE = ("normal-1", "normal-2", "normal-8", "t-1", "t-2", "t-8")
STARTS = ("normal-2-away", "t-2-away", "normal-2-near", "t-2-near")
KINDS = ("growing", "rotated", *RIDGE, *STARTS, "jumps")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
# Fixed lower steps, as multiples of 1 / (the largest curvature at the start).
GRID = tuple(2.0**k for k in range(-10, 3))
SOLVED = 1e-8
STEPS, UPPER = 400, 0.05

# An outcome: the error at the start and at the end.
Outcome = tuple[Any, Any]


def growing(variants: int, *, rotated: bool) -> tuple[Any, Any]:
    """Arrays of all variants, and (solver, key, arrays) -> outcome."""
    size, found = 8, []
    for seed in range(variants):
        rng = np.random.default_rng(seed)
        turned = np.linalg.qr(rng.normal(size=(size, size)))[0] if rotated else np.eye(size)
        found.append((turned, np.full(size, rng.uniform(0.5, 3)), rng.uniform(1, 2.5, size)))

    def upper(x: Any, y: Any, batch: Any) -> Any:
        turned, _, goal = batch
        return 0.5 * jnp.sum((x - goal) ** 2) + 0.01 * jnp.sum((turned @ y - 2) ** 2)

    def lower(x: Any, y: Any, batch: Any) -> Any:
        turned, rate, _ = batch
        return 0.5 * jnp.sum(jnp.exp(rate * x) * (turned @ y - 1) ** 2)

    def outcome(solver: aipod.Alternating, key: Any, data: Any) -> Outcome:
        samples = FullBatch(data)
        problem = aipod.Bilevel(upper, lower, upper_samples=samples, lower_samples=samples)
        start = jnp.zeros(size), jnp.zeros(size)
        best = 0.01 * size
        x, y = ended(solver, problem, *start, key)
        return upper(*start, data) - best, upper(x, y, data) - best

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found), outcome


def ridge(
    variants: int, *, batch: int, heavy: bool, first: float = -2.0, spread: float = 0.0
) -> tuple[Any, Any]:
    """The same, with x from `first` on and y from a random start of this `spread`."""
    found = []
    for seed in range(variants):
        rng = np.random.default_rng(seed)
        shape = (400, 10)
        inputs = rng.standard_t(4, size=shape) if heavy else rng.normal(size=shape)
        weights = rng.normal(size=10)
        targets = inputs @ weights + 0.1 * rng.normal(size=400)
        others = rng.normal(size=(100, 10))
        # F has one argument: a fine grid finds its minimum.
        logs = np.linspace(-12, 2, 1401)
        gram, right = inputs.T @ inputs / 400, inputs.T @ targets / 400
        values, vectors = np.linalg.eigh(gram)
        ys = vectors @ ((vectors.T @ right)[:, None] / (values[:, None] + np.exp(logs)))
        best = 0.5 * np.mean((others @ ys - (others @ weights)[:, None]) ** 2, 0).min()
        start = np.full(1, first), spread * rng.normal(size=10)
        found.append(((inputs, targets), (others, others @ weights), best, start))

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return 0.5 * jnp.mean((batch[0] @ y - batch[1]) ** 2)

    def lower(x: Any, y: Any, batch: Any) -> Any:
        return upper(x, y, batch) + 0.5 * jnp.exp(x[0]) * jnp.sum(y**2)

    def outcome(solver: aipod.Alternating | None, key: Any, data: Any) -> Outcome:
        train, validation, best, start = data
        problem = aipod.Bilevel(
            upper,
            lower,
            upper_samples=Minibatches(validation, batch),
            lower_samples=Minibatches(train, batch),
        )
        x, y = descended(*data) if solver is None else ended(solver, problem, *start, key)
        # From y = 0 on, so that starts compare.
        nothing = upper(start[0], jnp.zeros(10), validation)
        return nothing - best, upper(x, y, validation) - best

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found), outcome


def descended(train: Any, validation: Any, best: Any, start: Any) -> tuple[Any, Any]:
    """Gradient descent on F, without noise: x, and y*(x)."""
    inputs, targets = train
    gram, right = inputs.T @ inputs / len(targets), inputs.T @ targets / len(targets)

    def answer(x: Any) -> Any:
        return jnp.linalg.solve(gram + jnp.exp(x[0]) * jnp.eye(len(right)), right)

    def value(x: Any) -> Any:
        return 0.5 * jnp.mean((validation[0] @ answer(x) - validation[1]) ** 2)

    x = jax.lax.fori_loop(0, STEPS, lambda _, x: x - UPPER * jax.grad(value)(x), start[0])
    return x, answer(x)


def ended(solver: aipod.Alternating, problem: aipod.Bilevel, x: Any, y: Any, key: Any) -> Any:
    def body(state: Any, _: None) -> tuple[Any, None]:
        return solver.step(problem, state, key=key), None

    state, _ = jax.lax.scan(body, solver.init(problem, x, y), None, length=STEPS)
    return state.x, state.y


def together(kind: str, make: Callable[..., Any], variants: int) -> tuple[Any, Any, Any]:
    """Outcomes with `Curvature` for every variant, with every fixed step, and of exact descent."""
    exact = None
    if kind in ("growing", "rotated"):
        data, outcome = growing(variants, rotated=kind == "rotated")
    else:
        features, batch, *start = kind.split("-")
        begun = {"near": {"first": -6.0}, "away": {"spread": 2.0}}.get("".join(start), {})
        data, outcome = ridge(variants, batch=int(batch), heavy=features == "t", **begun)
        exact = jax.jit(jax.vmap(lambda one: outcome(None, None, one)))(data)
    keys = jax.random.split(jax.random.key(1), variants)
    by_curvature = jax.jit(jax.vmap(lambda key, one: outcome(make(upper_lr=UPPER), key, one)))

    def fixed(step: Any) -> Any:
        solver = make(upper_lr=UPPER, lower_lr=step, adjoint_lr=step)
        return jax.vmap(lambda key, one: outcome(solver, key, one))(keys, data)

    return by_curvature(keys, data), jax.jit(jax.vmap(fixed))(jnp.asarray(GRID)), exact


def jumps(make: Callable[..., Any], variants: int) -> tuple[Any, Any, Any]:
    """The same for federations; one run after the other, all by the same programs."""
    clients, size = 5, 4

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return 0.5 * jnp.sum((x - 1.5) ** 2) + 0.01 * jnp.sum((y - 2) ** 2)

    def lower(x: Any, y: Any, batch: Any) -> Any:
        return 0.5 * jnp.exp(batch[0, 0] * x[0]) * jnp.sum((y - 1) ** 2)

    start = [federated.replicate(jnp.zeros(n), clients) for n in (1, size)]
    best = 0.01 * size

    def one(seed: int, **steps: Any) -> Outcome:
        rates = np.random.default_rng(seed).uniform(2, 6, size=(clients, 1, 1))
        problem = federated.federate(upper, lower, rates, rates, batch_size=None)
        solver, key = make(upper_lr=0.3, **steps), jax.random.key(seed)
        found = aipod.solve(problem, solver, *start, STEPS, key=key, every=STEPS, throw=False)
        x, y = (leaf[0] for leaf in (found.x, found.y))
        error = float(upper(x, y, None)) - best
        failed = found.result is aipod.Result.diverged
        return float(upper(jnp.zeros(1), jnp.zeros(size), None)) - best, np.inf if failed else error

    def each(**steps: Any) -> Any:
        return np.array([one(seed, **steps) for seed in range(variants)]).T

    # Few of the grid: at the solution the curvature is up to exp(9).
    grid = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    return each(), np.stack([each(lower_lr=b, adjoint_lr=b) for b in grid], axis=1), None


def judged(outcomes: Any) -> tuple[Any, Any]:
    """Relative errors, and whether a run diverged."""
    first, last = (np.asarray(value, float) for value in outcomes)
    relative = np.maximum(last / first, SOLVED)
    return relative, ~np.isfinite(relative) | (relative > 1e3)


def row(kind: str, name: str, variants: int) -> dict[str, Any]:
    """One solver on all variants of a kind."""
    found = (
        jumps(SOLVERS[name], variants)
        if kind == "jumps"
        else together(kind, SOLVERS[name], variants)
    )
    (own, diverged), (fixed, wild) = (judged(outcomes) for outcomes in found[:2])
    medians = np.median(np.where(wild, np.inf, fixed), axis=1)
    best = int(np.argmin(medians))
    mine = float(np.median(np.where(diverged, np.inf, own)))
    exact = None if found[2] is None else float(np.median(judged(found[2])[0]))
    return {
        "kind": kind,
        "solver": name,
        "runs": variants,
        "diverged": int(diverged.sum()),
        "error": mine,
        "fixed": float(medians[best]),
        "ratio": mine / float(medians[best]),
        "exact": exact and exact / float(medians[best]),
        "fixed_diverged": int(wild[best].sum()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kind | solver | diverged | error | best fixed step | ratio | exact descent |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        exact = "" if found["exact"] is None else f"{found['exact']:.2f}"
        lines.append(
            f"| {found['kind']} | {found['solver']} | {found['diverged']} of {found['runs']} | "
            f"{found['error']:.2g} | {found['fixed']:.2g} | {found['ratio']:.2f} | {exact} |"
        )
    return "\n".join(lines)


def of_ratios(rows: list[dict[str, Any]]) -> str:
    """Kinds by solvers: the ratio, and in brackets that of exact descent; what diverged."""
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    by_place = {(row["kind"], row["solver"]): row for row in rows}

    def cell(found: dict[str, Any]) -> str:
        text = f"{found['ratio']:.2f}"
        text += "" if found["exact"] is None else f" ({found['exact']:.2f})"
        return text + (f", {found['diverged']} diverged" if found["diverged"] else "")

    kinds = dict.fromkeys(row["kind"] for row in rows)
    lines = [[kind, *(cell(by_place[kind, solver]) for solver in solvers)] for kind in kinds]
    return markdown(["kind", *solvers], lines).rstrip("\n")


def into_page(rows: list[dict[str, Any]], page: Path = PAGE) -> None:
    """Puts the table of ratios into the page between its two marks."""
    write_between_marks(page, "divergence", of_ratios(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, with commas")
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--variants", type=int, help="in place of 20, and 30 for ridge")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--docs", type=Path, help="put such a file into docs/benchmarks.md")
    chosen = parser.parse_args()
    if chosen.docs:
        into_page(json.loads(chosen.docs.read_text()))
        return
    if unknown := set(chosen.only.split(",")) - set(KINDS):
        parser.error(f"--only: no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}.")
    jax.config.update("jax_enable_x64", True)
    rows = []
    for kind in chosen.only.split(","):
        for name in chosen.solvers.split(","):
            usual = 20 if kind in ("growing", "rotated", "jumps") else 30
            rows.append(row(kind, name, chosen.variants or usual))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if chosen.json:
        text = ",\n".join(json.dumps(found) for found in rows)
        write_text(chosen.json, f"[\n{text}\n]\n")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
