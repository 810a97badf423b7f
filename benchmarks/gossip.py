"""Without a server on MNIST: rounds to an accuracy on graphs, beside a server and two rivals.

    AIPOD_DATA=/folder/with/mnist python benchmarks/gossip.py --graphs exponential --out e.json
    AIPOD_DATA=/folder/with/mnist python benchmarks/gossip.py --graphs ring --out r.json
    python benchmarks/gossip.py --show e.json r.json

Hyper-representation learning with 50 clients of two shards each, as in the paper's Figure 2. The
accuracy is that of the mean of the clients' models, which nobody needs for the run. E3-AiPOD has
its defaults. The rivals have curvature-safe steps on y and z; on x each step size of `--rates`, of
which the table shows the best, and in a row of its own ("ours") E3-AiPOD's optimiser. Every seed
has its own partition, starting point, samples and random graph.
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
RIVALS = {"D-SOBA": aipod.DSOBA, "SPARKLE": aipod.SPARKLE}


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
        every=1,
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
    """Every run: (graph, method, step size on x, seed) and what it gave.

    Seeds and step sizes come last: they are arguments of one compiled program.
    """
    rates = [None if rate == "ours" else float(rate) for rate in arguments.rates.split(",")]
    chosen = arguments.methods.split(",")
    made = [built(s, arguments.images, arguments.clients) for s in range(arguments.seeds)]

    def go(name: str, graph: str, solver: Any, rate: float | None, steps: int) -> Any:
        for seed, (problem, x0, y0, record) in enumerate(made):
            if graph != "server":
                links = graph_of(graph, arguments.clients, seed)
                problem = dataclasses.replace(problem, upper_set=links, lower_set=links)
            found = one_run(problem, solver, (x0, y0), record, steps, seed)
            yield {"graph": graph, "method": name, "rate": rate, "seed": seed, **found}

    if "consensus" in chosen:
        yield from go("E3-AiPOD", "server", aipod.E3AiPOD(), None, arguments.steps)
    for graph in filter(None, arguments.graphs.split(",")):
        if "e3-aipod" in chosen:
            yield from go("E3-AiPOD", graph, aipod.E3AiPOD(), None, arguments.steps)
        for name, rival in RIVALS.items():
            for rate in rates if name.lower() in chosen else ():
                # An array, so that the next step size finds the program of the first.
                solver = rival() if rate is None else rival(upper_lr=jnp.asarray(rate))
                label = f"{name}, ours" if rate is None else name
                yield from go(label, graph, solver, rate, arguments.rival_steps)


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
    parser.add_argument("--graphs", default="exponential")
    parser.add_argument("--methods", default="consensus,e3-aipod,d-soba,sparkle")
    parser.add_argument("--steps", type=int, default=1000, help="outer steps of E3-AiPOD")
    parser.add_argument("--rival-steps", type=int, default=2000, help="those of the rivals")
    parser.add_argument("--rates", default="0.03,0.1,0.3,1,ours", help="steps on x of the rivals")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--images", type=int, default=None, help="fewer images, for a trial")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--show", type=Path, nargs="+", help="print the table of these files")
    arguments = parser.parse_args()
    if arguments.show:
        print(shown([one for f in arguments.show for one in json.loads(f.read_text())["runs"]]))
        return
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
