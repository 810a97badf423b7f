"""The parts of a problem: whether they fit, where x0 and y0 lie, and what the samplers draw."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.functions import keep
from aipod._misc.tree import all_finite, cast_like
from aipod.diagnose._findings import Notes, count, first_line
from aipod.diagnose._measure import norm, precision, same_batch
from aipod.problem import Bilevel, Constant, Sampler, draw, expected
from aipod.sets import AbstractSet
from aipod.sets._inputs import largest, total_size

# Below this spectral gap of a graph, news takes more than a hundred rounds to spread.
_POOR_GAP = 0.01


def check_fit(notes: Notes, problem: Any, x0: PyTree, y0: PyTree) -> PyTree | None:
    if not isinstance(problem, Bilevel):
        kind = type(problem).__name__
        notes.error("problem", f"is of type {kind}.", "pass an aipod.Bilevel.")
        return None
    x0, y0 = keep(x0), keep(y0)
    for name, tree in (("x0", x0), ("y0", y0)):
        if total_size(tree) == 0:
            notes.error(name, "holds no numbers.", f"pass {name} in the structure of a solution.")
            return None
        if not all_finite(tree):
            notes.error(name, "holds NaN or infinity.", "start from finite numbers.")
            return None
    try:
        problem.check(x0, y0)
    except ValueError as error:
        notes.error("fit", first_line(error), "nothing else can be checked before this is mended.")
        return None
    notes.ok("fit", f"x has {count(total_size(x0), 'variable')}, y has {total_size(y0)}.")
    return jax.tree.map(jnp.asarray, (x0, y0))


def check_graph(notes: Notes, problem: Bilevel) -> None:
    """Where clients gossip: how well their graph spreads news, and which methods are exact."""
    graph: Any = problem.lower_set
    if not graph.apart:
        return
    mean = 2 * len(graph.edges) / graph.clients
    what = (
        f"{graph.clients} clients with {mean:.3g} neighbours each in the mean, spectral gap "
        f"{graph.gap:.3g}."
    )
    if graph.participation < 1:
        what += f" In a round {graph.participation:.0%} of the links work."
    if graph.gap < _POOR_GAP:
        notes.warning(
            "graph",
            f"{what} News takes about {1 / graph.gap:.0f} rounds to spread.",
            "add links between clients that are far apart: aipod.Gossip('exponential', "
            f"{graph.clients}) needs few of them; or take fewer lower_steps, which leave less to "
            "agree on.",
        )
    else:
        notes.ok("graph", what)
    notes.ok(
        "methods",
        "aipod.E3AiPOD corrects x, y and the adjoint, and reaches a solution without a server. "
        "aipod.E2AiPOD corrects y and the adjoint, but moves x by decentralised SGD; aipod.EAiPOD, "
        "aipod.AiPOD, aipod.FedNest and the like mix where they would project: where clients "
        "differ, these are inexact and stop near a solution.",
    )


def check_set(
    notes: Notes, name: str, start: str, set_: AbstractSet, point: PyTree, x: PyTree = None
) -> PyTree:
    rows, rank = set_.constraints(point)
    dimension = None if rank is None else total_size(point) - rank
    notes.numbers.setdefault("ranks", {})[name] = rank
    notes.numbers.setdefault("dimensions", {})[name] = dimension
    what = type(set_).__name__
    if rows:
        what += f", {count(rows, 'constraint')}"
    if rank is None or dimension is None:
        what += ", not factored"
    elif rank:
        what += f" of rank {rank}, {count(dimension, 'dimension')} left"
    eps, inside = precision(point), cast_like(set_.project(point, x), point)
    miss = largest(set_.residual(inside, x))
    # Rounding is relative to what a move of the point's own size does to the residual.
    move = optax.tree.random_like(jax.random.key(0), inside, jax.random.normal)
    probe = optax.tree.add_scale(inside, max(1.0, largest(inside)), move)
    if miss <= 100 * eps**0.75 * largest(set_.residual(probe, x)):
        notes.ok(name, f"{what}; residual after projection {miss:.1g}.")
    else:
        notes.error(
            name,
            f"{what}; it is empty where x0 projects to: the nearest point misses by {miss:.3g}.",
            "make c - h(x) lie in the range of A for every x of the upper set: rows of A that "
            "repeat each other must ask for the same value.",
        )
    distance = norm(optax.tree.sub(inside, point))
    if distance <= eps**0.5 * (1 + norm(point)):
        notes.ok(start, f"in the {name}.")
    else:
        call = "project(y0, x0)" if set_.coupled else f"project({start})"
        notes.warning(
            start,
            f"{distance:.3g} away from the {name}; the checks below move it there first.",
            f"start from problem.{name}.{call}.",
        )
    return inside


def check_samplers(
    notes: Notes, problem: Bilevel, key: PRNGKeyArray
) -> tuple[Bilevel, Bilevel, bool]:
    """The problem on its expectations, that on one batch, and whether the former are known."""
    keys = jax.random.split(key)
    drawn: list[Any] = []
    fixed: list[Any] = []
    known = True
    for name in ("upper_samples", "lower_samples"):
        samples: Sampler | None = getattr(problem, name)
        batch, other = (draw(samples, k) for k in keys)
        if not same_batch(batch, draw(samples, keys[0])):
            notes.error(
                name,
                "gives another batch when it is called again with the same key.",
                "draw with the key alone, as in jax.random.randint(key, ...): numbers of NumPy or "
                "of Python's random are drawn once, when the step is compiled, and never change.",
            )
        deterministic = same_batch(batch, other)
        drawn.append(Constant(batch))
        kind = "deterministic" if deterministic else "random"
        try:
            fixed.append(Constant(expected(samples)))
            notes.ok(name, "none." if samples is None else f"{kind}, with a known expectation.")
        except Exception as error:
            fixed.append(Constant(batch))
            known = known and deterministic
            if deterministic:
                notes.ok(name, "deterministic: two keys give the same batch.")
            else:
                notes.warning(
                    name,
                    "random, and its expectation is not known: the checks below see one batch. "
                    f"({first_line(error)})",
                    "give the sampler a method expected(); the exact reference values need it.",
                )
    parts = (problem.upper, problem.lower, problem.upper_set, problem.lower_set)
    return Bilevel(*parts, *fixed), Bilevel(*parts, *drawn), known
