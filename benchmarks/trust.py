"""What trust costs: accuracy with privacy, and with clients that lie, on the paper's first task.

    python benchmarks/trust.py privacy --data mnist --seeds 3 --out privacy.json
    python benchmarks/trust.py liars --data mnist --seeds 3 --out liars.json
    python benchmarks/trust.py show privacy.json liars.json

`privacy`: E3-AiPOD with each client's vectors cut and noisy, as `aipod.flower.Privacy` does it, for
epsilon 8, 4 and 2 at delta 1e-5; the noise is each client's own (`local`), or that of the sum, as
with secure sums (`distributed`). `liars`: accuracy against the share of attackers, with and without
defence. It needs nothing beyond what `aipod` itself needs.
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
    clip: jax.Array
    deviation: jax.Array
    corrected: bool = eqx.field(static=True)


def _kept(state: Any, terms: Terms) -> Any:
    if terms.corrected:
        return state
    zeros = jax.tree.map(jnp.zeros_like, state.correction)
    return dataclasses.replace(state, correction=zeros)


class Kept(eqx.Module):
    inner: Any
    start: Any


class PrivateLower(AbstractLower):
    """`OneRound`, whose y_hat leaves a client covered; corrections go by what was sent."""

    inner: OneRound
    terms: Terms

    @property
    def lr(self) -> Any:
        return self.inner.lr

    @property
    def draws(self) -> int:
        return self.inner.draws

    @property
    def deferred(self) -> bool:
        return True

    def init(self, problem: Any, x: Any, y: Any) -> Any:
        return Kept(self.inner.init(problem, x, y), y)

    def own(self, state: Any) -> Any:
        return Kept(self.inner.own(state.inner), jax.tree.map(lambda _: False, state.start))

    def run(self, turn: Any, state: Any) -> Any:
        end, inner, cost = self.inner.run(turn, state.inner)
        return end, Kept(inner, turn.y), cost

    def settle(self, turn: Any, state: Any) -> Any:
        key = jax.random.fold_in(turn.key, 101)
        sent = covered(turn.y, state.start, self.terms.clip, self.terms.deviation, key)
        y, inner = self.inner.settle(turn._replace(y=sent), state.inner)
        return y, Kept(_kept(inner, self.terms), y)


class PrivateAdjoint(AbstractAdjoint):
    """`OneRoundAdjoint` in the same way."""

    inner: OneRoundAdjoint
    terms: Terms

    @property
    def lr(self) -> Any:
        return self.inner.lr

    @property
    def draws(self) -> tuple[int, int]:
        return self.inner.draws

    @property
    def deferred(self) -> bool:
        return True

    def init(self, problem: Any, x: Any, y: Any) -> Any:
        inner = self.inner.init(problem, x, y)
        return Kept(inner, inner.u)

    def own(self, state: Any) -> Any:
        return Kept(self.inner.own(state.inner), jax.tree.map(lambda _: False, state.start))

    def health(self, state: Any) -> Any:
        return self.inner.health(state.inner)

    def solve(self, turn: Any, upper_batch: Any, state: Any) -> Any:
        z, inner, cost = self.inner.solve(turn, upper_batch, state.inner)
        return z, Kept(inner, state.inner.u), cost

    def settle(self, turn: Any, state: Any) -> Any:
        key = jax.random.fold_in(turn.key, 102)
        sent = covered(state.inner.u, state.start, self.terms.clip, self.terms.deviation, key)
        inner = self.inner.settle(turn, dataclasses.replace(state.inner, u=sent))
        return Kept(_kept(inner, self.terms), inner.u)


class PrivateMean(AbstractAgreement):
    """Consensus of clients whose gradients leave them covered."""

    terms: Terms
    key: Any = None

    def project(self, y: Any, x: Any = None) -> Any:
        return Consensus().project(y)

    def tangent(self, v: Any) -> Any:
        zero = jax.tree.map(jnp.zeros_like, v)
        key = jax.random.fold_in(self.key, 103)
        return Consensus().tangent(covered(v, zero, self.terms.clip, self.terms.deviation, key))

    def residual(self, y: Any, x: Any = None) -> Any:
        return Consensus().residual(y)

    def for_round(self, key: Any) -> Any:
        return eqx.tree_at(lambda s: s.key, self, key, is_leaf=lambda leaf: leaf is None)

    def message_size(self, y: Any) -> int:
        return bytes_of_one_client(y)


def private_run(arguments: argparse.Namespace, epsilon: float | None, where: str, seed: int) -> Any:
    experiment = load("hyper-representation")
    task = experiment.build(
        experiment.options(
            data=arguments.data,
            clients=arguments.clients,
            partition=arguments.partition,
            problem_seed=seed,
        )
    )
    steps, noise = arguments.steps, 0.0
    if epsilon is not None:
        noise = noise_for(epsilon, steps) / (
            math.sqrt(arguments.clients) if where == "distributed" else 1.0
        )
    clip = arguments.clip
    # Without noise nothing is cut either.
    cut = jnp.asarray(clip if noise else jnp.inf)
    terms = Terms(cut, jnp.asarray(noise * clip), arguments.corrections)
    solver = Alternating(
        lower=PrivateLower(OneRound(lr=arguments.lower_lr, steps=arguments.lower_steps), terms),
        adjoint=PrivateAdjoint(OneRoundAdjoint(2, arguments.lower_lr, 0.0), terms),
        upper=EveryStep(optimizer=aipod.fading_adam(arguments.upper_lr)),
    )
    problem = dataclasses.replace(task.problem, upper_set=PrivateMean(terms))
    return solved(problem, solver, task, steps, seed) | {"noise": noise, "clip": clip}


# Clients that lie


def lying_run(
    arguments: argparse.Namespace, share: float, attack: str, defence: str, seed: int
) -> Any:
    experiment = load("byzantine")
    task = experiment.build(
        experiment.options(
            data=arguments.data,
            clients=arguments.clients,
            partition=arguments.partition,
            problem_seed=seed,
            attackers=share,
            attack=attack,
            defence=defence,
        )
    )
    return solved(task.problem, aipod.E3AiPOD(), task, arguments.steps, seed)


def solved(problem: Any, solver: Any, task: Any, steps: int, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    solution = aipod.solve(
        *(problem, solver, task.x0, task.y0, steps),
        key=jax.random.key(seed),
        record=task.record,
        every=5,
        throw=False,
    )
    accuracy, rounds = solution.history["accuracy"], solution.history["rounds"]
    last = float(np.nan_to_num(accuracy[-1])) if len(accuracy) else 0.0
    return {
        "seed": seed,
        "result": solution.result.name,
        "accuracy": last,
        "best": float(np.nanmax(accuracy)) if len(accuracy) else 0.0,
        "first": {
            f"{level:.2f}": int(rounds[np.argmax(accuracy >= level)])
            if np.any(accuracy >= level)
            else None
            for level in LEVELS
        },
        "seconds": time.perf_counter() - began,
    }


def privacy(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cases: list[tuple[float | None, str]] = [(None, "none")]
    cases += [(epsilon, where) for where in ("local", "distributed") for epsilon in (8.0, 4.0, 2.0)]
    return [
        _told({"kind": "privacy", "epsilon": epsilon, "noise from": where}
              | private_run(arguments, epsilon, where, seed))
        for epsilon, where in cases
        for seed in range(arguments.seeds)
    ]  # fmt: skip


def liars(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    attacks = arguments.attacks.split(",")
    defences = ("none", "trimmed-mean", "geometric-median", "clipped-mean")
    shares = [float(share) for share in arguments.shares.split(",")]
    cases = [(0.0, "sign-flip", defence) for defence in defences]
    cases += [(share, a, d) for share in shares if share for a in attacks for d in defences]
    return [
        _told({"kind": "liars", "attackers": share, "attack": attack, "defence": defence}
              | lying_run(arguments, share, attack, defence, seed))
        for share, attack, defence in cases
        for seed in range(arguments.seeds)
    ]  # fmt: skip


def _told(one: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(one), flush=True)
    return one


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
    parser.add_argument("--shares", default="0,0.1,0.2,0.3")
    parser.add_argument("--attacks", default="sign-flip,scaled,noise,little,label-flip")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.what == "show":
        show(arguments.files)
        return
    runs = {"privacy": privacy, "liars": liars}[arguments.what](arguments)
    device = jax.devices()[0].device_kind
    if arguments.out:
        text = json.dumps({"arguments": vars(arguments), "device": device, "runs": runs}, indent=1)
        Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
