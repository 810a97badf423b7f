"""The experiments of the command.

`tasks/` holds one file per experiment, and the tables that they read. `studies/` holds what
`aipod rates` and `aipod compare table1` measure. The files beside this one turn the names and
values of a command line into a run.

To add an experiment, add a file with an `EXPERIMENT` to `tasks/` (see `base.py`), and a line to
`SUMMARIES`. A task in a user's own file needs neither (see `own.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from aipod.experiments.values import shown, suggestion

if TYPE_CHECKING:
    from aipod.experiments.base import Experiment

# The file of an experiment is imported when it is used, because some need further packages.
SUMMARIES = {
    "synthetic": "the paper's Figure 1: a noisy problem of known solution with both levels "
    "constrained",
    "hyper-representation": "the paper's Figure 2: clients learn a representation on validation "
    "data, its classifier on training data",
    "loss-tuning": "the paper's Figure 3: clients with few examples of some classes tune the loss "
    "they train with",
    "byzantine": "the same clients, some of which lie, and averages that few of them cannot move",
    "gossip": "clients without a server, who talk to their neighbours in a graph: representations, "
    "or wrong labels",
    "portfolio": "weights of 20 shares whose factor exposures are chosen to be calm in later years",
    "transport": "the hidden cost of journeys, learned from who works where by optimal transport",
    "cleaning": "wrong labels among the digits, found by weighing examples on clean data",
    "tolls": "tolls on the roads of Sioux Falls, whose drivers choose their own routes",
}


def load(name: str) -> "Experiment":
    """Returns the `EXPERIMENT` in the file of that name, or the one of `file.py:function`."""
    if name not in SUMMARIES and ":" in name:
        return _own(name)
    if name not in SUMMARIES:
        own = f"{name}:task" if name.endswith(".py") else "mine.py:task"
        raise ValueError(
            f"there is no experiment {shown(name)}.{suggestion(name, SUMMARIES)} "
            f"Experiments: {', '.join(SUMMARIES)}; or a function of your own, {own}."
        )
    module = importlib.import_module(f"aipod.experiments.tasks.{name.replace('-', '_')}")
    return module.EXPERIMENT


def _own(target: str) -> "Experiment":
    from aipod.experiments.own import own

    return own(target, taken())


def taken() -> dict[str, None]:
    """The names that options of a task of one's own may not have."""
    from aipod.experiments.config import RUN_NAMES
    from aipod.experiments.solvers import ARGUMENTS

    return dict.fromkeys((*RUN_NAMES, *ARGUMENTS, *_NAMES))


# Options of the command that describe no run.
_NAMES = (
    *("as_json", "config", "debug", "force", "help", "json", "mesh", "out", "panel", "resume"),
    *("seeds", "set", "set_", "solvers", "target", "task_digest", "tensorboard"),
)


def __getattr__(name: str) -> Any:
    """`Task`, `Metric` and `Picture`, for tasks of one's own; loaded when they are asked for."""
    if name not in ("Task", "Metric", "Picture"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("aipod.experiments.base"), name)
