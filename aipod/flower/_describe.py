"""A run of any app in the words of a run folder."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from aipod import federated
from aipod.algorithms import Alternating
from aipod.flower._progress import Terms
from aipod.runs._description import Description


def describe(
    name: str, solver: Alternating, terms: Terms, record: Any, x0: PyTree, y0: PyTree
) -> Description:
    """A description for a run folder, from what a server knows anyway."""
    slots = (solver.lower, solver.adjoint, solver.upper)
    config = {
        "experiment": name,
        "solver": " + ".join(type(slot).__name__ for slot in slots),
        "steps": terms.steps,
        "every": terms.every,
        "seed": terms.seed,
        "min_nodes": terms.min_nodes or 0,
        "average": "mean" if terms.average is None else type(terms.average).__name__,
    }
    return Description(
        experiment=name,
        solver=str(config["solver"]),
        seed=terms.seed,
        toml=_toml(config),
        config=config,
        arguments={},
        metrics=_metrics(record, x0, y0),
        axes=("rounds", "bytes_up"),
    )


def _metrics(record: Any, x0: PyTree, y0: PyTree) -> list[dict[str, Any]]:
    """The numbers that `record` returns; the time where it returns none."""
    found: Mapping[str, Any] = {}
    if record is not None:
        both = (federated.replicate(tree, 1) for tree in (x0, y0))
        found = jax.eval_shape(record, *both)
    names = [name for name, value in found.items() if np.shape(value) == ()] or ["seconds"]
    return [
        {
            "name": name,
            "label": name.replace("_", " "),
            "log": False,
            "better": "larger" if "accuracy" in name else "smaller",
        }
        for name in names
    ]


def _toml(config: Mapping[str, Any]) -> str:
    # Texts and numbers are written alike in JSON and in TOML.
    lines = [f"{name} = {json.dumps(value)}" for name, value in config.items()]
    return "# A run on Flower: start it again with `flwr run`.\n" + "\n".join(lines) + "\n"
