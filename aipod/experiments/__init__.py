"""The experiments of the command: each is one small file that a reader can begin with.

A new one is a file in `tasks/` with an `EXPERIMENT` in it (see `base.py`), and a line in
`SUMMARIES`.
"""

import importlib
from typing import TYPE_CHECKING

from aipod.experiments.values import shown, suggestion

if TYPE_CHECKING:
    from aipod.experiments.base import Experiment

# An experiment's file is only imported when it is used, with whatever else it needs.
SUMMARIES = {
    "synthetic": "the paper's Figure 1: a noisy problem of known solution with both levels "
    "constrained",
    "hyper-representation": "the paper's Figure 2: clients learn a representation on validation "
    "data, its classifier on training data",
    "loss-tuning": "the paper's Figure 3: clients with few examples of some classes tune the loss "
    "they train with",
    "portfolio": "weights of 20 shares whose factor exposures are chosen to be calm in later years",
    "transport": "the hidden cost of journeys, learned from who works where by optimal transport",
    "cleaning": "wrong labels among the digits, found by weighing examples on clean data",
    "tolls": "tolls on the roads of Sioux Falls, whose drivers choose their own routes",
}


def load(name: str) -> "Experiment":
    """The experiment of that name: `EXPERIMENT` in the file named after it."""
    if name not in SUMMARIES:
        raise ValueError(
            f"there is no experiment {shown(name)}.{suggestion(name, SUMMARIES)} "
            f"Experiments: {', '.join(SUMMARIES)}."
        )
    module = importlib.import_module(f"aipod.experiments.tasks.{name.replace('-', '_')}")
    return module.EXPERIMENT
