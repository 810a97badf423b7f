"""What trust costs: accuracy with privacy, and with clients that lie, on the paper's first task.

    python benchmarks/trust.py privacy --data mnist --seeds 3 --out privacy.json
    python benchmarks/trust.py liars --data mnist --seeds 3 --out liars.json
    python benchmarks/trust.py show privacy.json liars.json

`privacy`: E3-AiPOD with each client's vectors cut and noisy, as `aipod.flower.Privacy` does it, for
epsilon 8, 4 and 2 at delta 1e-5; the noise is each client's own (`local`), or that of the sum, as
with secure sums (`distributed`). `--momentum` adds the momentum that `E3AiPOD` has by default.
`liars`: accuracy against the share of attackers, with and without defence. It needs nothing beyond
what `aipod` itself needs.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.special import log_ndtr

import aipod
from aipod.algorithms import Alternating
from aipod.experiments import load
from aipod.sets import Consensus
from aipod.sets._agreement import AbstractAgreement, bytes_of_one_client
from aipod.slots.adjoint import AbstractAdjoint, OneRoundAdjoint
from aipod.slots.lower import AbstractLower, OneRound
from aipod.slots.upper import EveryStep

DELTA = 1e-5
LEVELS = (0.80, 0.85, 0.90)
Case = dict[str, Any]


# Privacy


def delta_of(epsilon: float, mu: float) -> float:
    """delta(epsilon) of a Gaussian release (Balle and Wang 2018, theorem 8), by this file alone."""
    above, below = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(above) - math.exp(epsilon + below)


def noise_for(epsilon: float, releases: int) -> float:
    """The noise, in units of the clip, of which `releases` exchanges add up to epsilon."""
    low, high = 1e-3, 1e3  # of mu for all releases together
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if delta_of(epsilon, middle) > DELTA else (middle, high)
    return 2 * math.sqrt(3 * releases) / low


def covered(sent: Any, known: Any, clip: jax.Array, deviation: jax.Array, key: Any) -> Any:
    """Each client's change cut to the clip, with noise; the leading axis is that of the clients."""
    flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])
    change = flat(sent) - flat(known)
    length = jnp.linalg.norm(change, axis=1, keepdims=True)
    shorter = change * jnp.minimum(1.0, clip / jnp.maximum(length, 1e-30))
    noise = deviation * jax.random.normal(key, change.shape, change.dtype)
    restore = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], sent))[1]
    return jax.vmap(restore)(flat(known) + shorter + noise)


class Terms(eqx.Module):
    """How each client's vectors are covered."""

    clip: jax.Array
    deviation: jax.Array
    corrected: bool = eqx.field(static=True)

    def cover(self, sent: Any, known: Any, key: Any) -> Any:
        return covered(sent, known, self.clip, self.deviation, key)

    def kept(self, state: Any) -> Any:
        if self.corrected:
            return state
        zeros = jax.tree.map(jnp.zeros_like, state.correction)
        return dataclasses.replace(state, correction=zeros)


class PrivateLower(AbstractLower):
    """`OneRound`, whose y_hat leaves a client covered."""

    inner: OneRound
    terms: Terms
    lr: float
    deferred = True

    @property
    def draws(self) -> int:
        return self.inner.draws

    def init(self, problem: Any, x: Any, y: Any) -> Any:
        return self.inner.init(problem, x, y)

    def own(self, state: Any) -> Any:
        return self.inner.own(state)

    def run(self, turn: Any, state: Any) -> Any:
        return self.inner.run(turn, state)

    def settle(self, turn: Any, state: Any) -> Any:
        sent = self.terms.cover(turn.y, turn.start, jax.random.fold_in(turn.key, 101))
        y, state = self.inner.settle(turn._replace(y=sent), state)
        return y, self.terms.kept(state)


class PrivateAdjoint(AbstractAdjoint):
    """`OneRoundAdjoint`, whose u_hat leaves a client covered."""

    inner: OneRoundAdjoint
    terms: Terms
    lr: float
    deferred = True

    @property
    def draws(self) -> tuple[int, int]:
        return self.inner.draws

    def init(self, problem: Any, x: Any, y: Any) -> Any:
        return self.inner.init(problem, x, y)

    def own(self, state: Any) -> Any:
        return self.inner.own(state)

    def health(self, state: Any) -> Any:
        return self.inner.health(state)

    def solve(self, turn: Any, upper_batch: Any, state: Any) -> Any:
        return self.inner.solve(turn, upper_batch, state)

    def settle(self, turn: Any, state: Any) -> Any:
        sent = self.terms.cover(state.u, turn.start.u, jax.random.fold_in(turn.key, 102))
        return self.terms.kept(self.inner.settle(turn, dataclasses.replace(state, u=sent)))


class PrivateMean(AbstractAgreement):
    """Consensus of clients whose gradients leave them covered."""

    terms: Terms
    key: Any = None

    def project(self, y: Any, x: Any = None) -> Any:
        return Consensus().project(y)

    def tangent(self, v: Any) -> Any:
        zero = jax.tree.map(jnp.zeros_like, v)
        return Consensus().tangent(self.terms.cover(v, zero, jax.random.fold_in(self.key, 103)))

    def residual(self, y: Any, x: Any = None) -> Any:
        return Consensus().residual(y)

    def for_round(self, key: Any) -> Any:
        return eqx.tree_at(lambda s: s.key, self, key, is_leaf=lambda leaf: leaf is None)

    def message_size(self, y: Any) -> int:
        return bytes_of_one_client(y)


def private(arguments: argparse.Namespace, case: Case, task: Any) -> tuple[Any, Any]:
    """The task with privacy: its problem, and E3-AiPOD with covered messages."""
    noise = 0.0
    if case["epsilon"] is not None:
        noise = noise_for(case["epsilon"], arguments.steps)
        noise /= math.sqrt(arguments.clients) if case["noise from"] == "distributed" else 1.0
    # Without noise nothing is cut either.
    cut = jnp.asarray(arguments.clip if noise else jnp.inf)
    terms = Terms(cut, jnp.asarray(noise * arguments.clip), arguments.corrections)
    lr, plain = arguments.lower_lr, None if arguments.momentum else optax.sgd(1.0)
    solver = Alternating(
        lower=PrivateLower(OneRound(lr, arguments.lower_steps, None, plain), terms, lr),
        adjoint=PrivateAdjoint(OneRoundAdjoint(2, lr, 0.0, None, plain), terms, lr),
        upper=EveryStep(optimizer=aipod.fading_adam(arguments.upper_lr)),
    )
    return dataclasses.replace(task.problem, upper_set=PrivateMean(terms)), solver


def run(arguments: argparse.Namespace, kind: str, case: Case, seed: int) -> Case:
    """One run of one case; its line is printed."""
    experiment = load("byzantine" if kind == "liars" else "hyper-representation")
    common = {name: getattr(arguments, name) for name in ("data", "clients", "partition")}
    attack = case if kind == "liars" else {}
    task = experiment.build(experiment.options(**common, problem_seed=seed, **attack))
    problem, solver = task.problem, aipod.E3AiPOD()
    if kind == "privacy":
        problem, solver = private(arguments, case, task)
    began = time.perf_counter()
    solution = aipod.solve(
        *(problem, solver, task.x0, task.y0, arguments.steps),
        key=jax.random.key(seed),
        record=task.record,
        every=5,
        throw=False,
    )
    accuracy, rounds = solution.history["accuracy"], solution.history["rounds"]
    reached = {level: np.flatnonzero(accuracy >= level) for level in LEVELS}
    line = {"kind": kind, **case, "seed": seed, "result": solution.result.name} | {
        "accuracy": float(np.nan_to_num(accuracy[-1])) if len(accuracy) else 0.0,
        "best": float(np.nanmax(accuracy)) if len(accuracy) else 0.0,
        "first": {f"{a:.2f}": int(rounds[i[0]]) if len(i) else None for a, i in reached.items()},
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(line), flush=True)
    return line


def cases(arguments: argparse.Namespace, kind: str) -> list[Case]:
    """What is run, by the names of its columns."""
    if kind == "privacy":
        levels = [(e, where) for where in ("local", "distributed") for e in (8.0, 4.0, 2.0)]
        return [{"epsilon": e, "noise from": where} for e, where in [(None, "none"), *levels]]
    attacks, shares = arguments.attacks.split(","), list(map(float, arguments.shares.split(",")))
    liars = [(share, a) for share in shares if share for a in attacks]
    if 0 in shares:
        # The attack has no meaning then.
        liars = [(0.0, attacks[0]), *liars]
    defences = ("none", "trimmed-mean", "geometric-median", "clipped-mean")
    return [{"attackers": s, "attack": a, "defence": d} for s, a in liars for d in defences]


def show(files: list[str]) -> None:
    """Prints tables with medians over seeds."""
    runs = [one for file in files for one in json.loads(Path(file).read_text())["runs"]]
    names = {"privacy": ("epsilon", "noise from"), "liars": ("attackers", "attack", "defence")}
    for kind, keys in names.items():
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for one in runs:
            if one["kind"] == kind:
                groups.setdefault(tuple(one[key] for key in keys), []).append(one)
        if groups:
            print("| " + " | ".join([*keys, "accuracy", "rounds to 85 %"]) + " |")
            print("|" + "---|" * (len(keys) + 2))
        for case, members in groups.items():
            accuracy = statistics.median(one["accuracy"] for one in members)
            first = [one["first"]["0.85"] for one in members]
            reached = "never" if None in first else f"{statistics.median(first):.0f}"
            cells = ["none" if cell is None else str(cell) for cell in case]
            print("| " + " | ".join([*cells, f"{accuracy:.3f}", reached]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["privacy", "liars", "show"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.3)
    parser.add_argument("--lower-lr", type=float, default=0.05)
    parser.add_argument("--lower-steps", type=int, default=20)
    parser.add_argument("--upper-lr", type=float, default=1e-3)
    parser.add_argument("--corrections", action="store_true")
    parser.add_argument("--momentum", action="store_true")
    parser.add_argument("--shares", default="0,0.1,0.2,0.3")
    parser.add_argument("--attacks", default="sign-flip,scaled,noise,little,label-flip")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.what == "show":
        show(arguments.files)
        return
    kind, runs = arguments.what, []
    device = jax.devices()[0].device_kind
    for case in cases(arguments, kind):
        for seed in range(arguments.seeds):
            runs.append(run(arguments, kind, case, seed))
            if arguments.out:
                # After each run: what a long study has found is not lost with it.
                found = {"arguments": vars(arguments), "device": device, "runs": runs}
                Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
