"""Without a server on MNIST: rounds to an accuracy on graphs, beside a server and two rivals.

    AIPOD_DATA=/folder/with/mnist python benchmarks/gossip.py --seeds 3 --graphs exponential,ring \
        --steps 1500 --out gossip.json
    python benchmarks/gossip.py --show gossip.json

Hyper-representation learning with 50 clients of two shards each, as in the paper's Figure 2. The
accuracy is that of the mean of the clients' models, which nobody needs for the run. The rivals have
curvature-safe steps on y and z, and each step size of `--rates` on x, of which the best is shown.
Every seed has its own partition, starting point, samples and random graph.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod import federated
from aipod.experiments.tasks import hyper_representation as task
from aipod.experiments.tasks.images import apply, cross_entropy, deal, federation, layer

LEVELS = (0.80, 0.85, 0.90, 0.92, 0.94)


def built(seed: int, images: int | None, clients: int) -> tuple[Any, Any, Any, Any]:
    """The problem with a server, its start and its measurements."""
    options = task.Options(data="mnist", clients=clients, problem_seed=seed)
    rng = np.random.default_rng([seed, 1])

    def some(labels: np.ndarray) -> np.ndarray:
        return np.arange(len(labels))[:images]

    dealt = deal(options, some)
    problem = federation(*task.objectives(options.ridge), dealt, options)
    x0 = layer(rng, dealt.pixels, options.hidden)
    y0 = layer(rng, options.hidden, dealt.classes)
    test = jnp.asarray(dealt.test.images), jnp.asarray(dealt.test.labels)

    def record(x: Any, y: Any) -> dict[str, Any]:
        mean = federated.average(x)
        logits = apply(federated.average(y), task.features(mean, test))
        apart = sum(jnp.sum((a - m[None]) ** 2) for a, m in zip(x, mean, strict=True))
        size = sum(jnp.sum(m**2) for m in mean) * clients
        return {
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == test[1]),
            "test_loss": jnp.mean(cross_entropy(logits, test[1])),
            "disagreement": jnp.sqrt(apart / size),
        }

    start = [federated.replicate(tree, clients) for tree in (x0, y0)]
    return problem, start[0], start[1], record


def graph_of(name: str, clients: int, seed: int) -> aipod.Gossip:
    key = jax.random.key(seed) if name == "erdos-renyi" else None
    return aipod.Gossip(name, clients, key=key)


def first_rounds(history: Any) -> dict[str, int | None]:
    """For each accuracy the rounds of the first record that reached it."""
    found = {}
    for level in LEVELS:
        hits = np.flatnonzero(history["accuracy"] >= level)
        found[str(level)] = int(history["rounds"][hits[0]]) if hits.size else None
    return found


def one_run(
    problem: Any, solver: Any, start: tuple[Any, Any], record: Any, steps: int, seed: int
) -> dict[str, Any]:
    began = time.perf_counter()
    stop = aipod.Stop(tolerance=None)
    solution = aipod.solve(
        problem,
        solver,
        *start,
        steps,
        key=jax.random.key(seed),
        record=record,
        every=2,
        stop=stop,
        throw=False,
    )
    history = solution.history
    return {
        "first": first_rounds(history),
        "last": {name: float(history[name][-1]) for name in ("accuracy", "disagreement")},
        "best": float(np.max(history["accuracy"])),
        "steps": int(history["step"][-1]),
        "result": solution.result.name,
        "ledger": dataclasses.asdict(solution.ledger),
        "seconds": time.perf_counter() - began,
        "curve": {
            name: np.asarray(history[name][:: max(1, len(history["step"]) // 200)]).tolist()
            for name in ("rounds", "accuracy", "disagreement")
        },
    }


def runs(arguments: argparse.Namespace) -> Any:
    """Every run: (graph, method, step size on x, seed) and what it gave."""
    rates = [float(rate) for rate in arguments.rates.split(",")]
    rivals = {"D-SOBA": aipod.DSOBA, "SPARKLE": aipod.SPARKLE}
    chosen = arguments.methods.split(",")
    for seed in range(arguments.seeds):
        problem, x0, y0, record = built(seed, arguments.images, arguments.clients)

        def go(
            name: str, made: Any, solver: Any, rate: float | None, graph: str, steps: int
        ) -> Any:
            found = one_run(made, solver, (x0, y0), record, steps, seed)  # noqa: B023
            return {"graph": graph, "method": name, "rate": rate, "seed": seed, **found}  # noqa: B023

        if "consensus" in chosen:
            yield go("E3-AiPOD", problem, aipod.E3AiPOD(), None, "server", arguments.steps)
        for name in arguments.graphs.split(","):
            graph = graph_of(name, arguments.clients, seed)
            made = dataclasses.replace(problem, upper_set=graph, lower_set=graph)
            if "e3-aipod" in chosen:
                yield go("E3-AiPOD", made, aipod.E3AiPOD(), None, name, arguments.steps)
            for method, rival in rivals.items():
                if method.lower() not in chosen:
                    continue
                for rate in rates:
                    solver = rival(upper_lr=rate)
                    yield go(method, made, solver, rate, name, arguments.rival_steps)


def shown(found: list[dict[str, Any]]) -> str:
    """A table in Markdown: the median over the seeds, of the best step size of a rival."""
    lines = [
        "| graph | method | rounds to 80 % | 85 % | 90 % | 92 % | 94 % | best accuracy | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((run["graph"], run["method"]) for run in found)
    for graph, method in kinds:
        mine = [run for run in found if (run["graph"], run["method"]) == (graph, method)]
        rates = dict.fromkeys(run["rate"] for run in mine)

        def rank(rate: Any, mine: Any = mine) -> tuple[float, float]:
            of = [run for run in mine if run["rate"] == rate]
            to = [run["first"]["0.9"] or float("inf") for run in of]
            return float(np.median(to)), -float(np.median([run["best"] for run in of]))

        best = min(rates, key=rank)
        of = [run for run in mine if run["rate"] == best]
        cells = []
        for level in LEVELS:
            to = [run["first"][str(level)] for run in of]
            reached = [value for value in to if value is not None]
            if len(reached) < len(to):
                cells.append(f"{len(reached)} of {len(to)} runs")
            else:
                cells.append(f"{np.median(reached):.0f} ({min(reached)} to {max(reached)})")
        label = method if best is None else f"{method}, upper_lr={best:g}"
        top = np.median([run["best"] for run in of])
        lines.append(f"| {graph} | {label} | {' | '.join(cells)} | {top:.3f} | {len(of)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graphs", default="exponential,ring")
    parser.add_argument("--methods", default="consensus,e3-aipod,d-soba,sparkle")
    parser.add_argument("--steps", type=int, default=1500, help="outer steps of E3-AiPOD")
    parser.add_argument("--rival-steps", type=int, default=None, help="those of the rivals")
    parser.add_argument("--rates", default="0.03,0.3,3", help="step sizes on x of the rivals")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--images", type=int, default=None, help="fewer images, for a trial")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--show", type=Path, default=None, help="print the table of a file")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(shown(json.loads(arguments.show.read_text())["runs"]))
        return
    arguments.rival_steps = arguments.rival_steps or 2 * arguments.steps
    kept: dict[str, Any] = {
        "machine": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
        "jax": jax.__version__,
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "runs": [],
    }
    for run in runs(arguments):
        kept["runs"].append(run)
        about = {name: run[name] for name in ("graph", "method", "rate", "seed", "first", "best")}
        print(json.dumps(about | {"seconds": round(run["seconds"], 1)}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(kept))
    print(shown(kept["runs"]))


if __name__ == "__main__":
    main()
