"""The stored reference solutions; `python benchmarks/gallery.py --references` computes them."""

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from aipod._misc.files import write_text
from aipod.experiments.gallery.exhibit import Setting

_FILE = "references.json"


class Reference(NamedTuple):
    """F at the start and at the solution, and the solution; in a federation, that of one client."""

    start: float
    best: float
    solution: tuple[float, ...]


@functools.cache
def references() -> dict[str, Reference]:
    """All stored references by the names of their problems."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return {
        name: Reference(one["start"], one["best"], tuple(one["solution"]))
        for name, one in json.loads(text).items()
    }


def store(found: dict[str, Reference], folder: Path = Path(__file__).parent) -> None:
    """Writes the references, each on a line; those of other problems stay."""
    path = folder / _FILE
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    all_of_them = old | {name: one._asdict() for name, one in found.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in all_of_them.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    references.cache_clear()


def in_structure(solution: tuple[float, ...], setting: Setting) -> PyTree:
    """The numbers of a stored solution as an x of this problem."""
    clients = setting.problem.upper_set.per_client
    one = jax.tree.map(lambda leaf: leaf[0], setting.x0) if clients else setting.x0
    restored = ravel_pytree(one)[1](jnp.asarray(np.array(solution), float))
    if not clients:
        return restored
    return jax.tree.map(
        lambda part, whole: jnp.broadcast_to(part[None], whole.shape), restored, setting.x0
    )
