"""Hyper-representation learning with clients that lie, and averages that few of them cannot move.

The task is that of `hyper-representation`, with images dealt at random: a robust average of clients
that differ much is far from their mean even when nobody lies.
"""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from aipod.experiments.attacks import Attacked, defended
from aipod.experiments.base import Experiment, Metric, Panel, Task, option
from aipod.experiments.limits import NOT_NEGATIVE, check_limits
from aipod.experiments.tasks import hyper_representation


@dataclasses.dataclass(frozen=True)
class Options(hyper_representation.Options):
    partition: Literal["shards", "dirichlet", "iid"] = option("iid", "how the images are dealt")
    attackers: float = option(0.2, "share of the clients that lie", NOT_NEGATIVE)
    attack: Literal["sign-flip", "scaled", "noise", "little", "label-flip"] = option(
        "scaled", "what they do"
    )
    defence: Literal["none", "trimmed-mean", "geometric-median", "clipped-mean"] = option(
        "trimmed-mean", "how the server averages"
    )
    trim: float = option(0.3, "share that a trimmed mean leaves out at either end", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.attackers < 0.5:
            raise ValueError(f"attackers must be less than 0.5, got {self.attackers}.")

    @property
    def liars(self) -> int:
        return round(self.attackers * self.clients)


def build(options: Options) -> Task:
    task = hyper_representation.build(options)
    agreement = defended(options.defence, options.trim)
    problem = task.problem
    if options.attack == "label-flip":
        samples = [
            _wrong_labels(one, options.liars)
            for one in (problem.upper_samples, problem.lower_samples)
        ]
        problem = dataclasses.replace(problem, upper_samples=samples[0], lower_samples=samples[1])
    else:
        agreement = Attacked(agreement, options.liars, options.attack)
    problem = dataclasses.replace(problem, upper_set=agreement, lower_set=agreement)
    return dataclasses.replace(task, problem=problem)


def _wrong_labels(samples: Any, liars: int) -> Any:
    """The first clients call every digit d a 9 - d."""
    wrong = np.array(samples.batch.data[1])
    wrong[:liars] = 9 - wrong[:liars]
    return eqx.tree_at(lambda one: one.batch.data[1], samples, jnp.asarray(wrong))


def panels(options: Options) -> tuple[Panel, ...]:
    return (Panel("Clients that lie", ("e3-aipod", "e-aipod:lower_prob=0.1")),)


EXPERIMENT = Experiment(
    name="byzantine",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("accuracy", "test accuracy", log=False, better="larger"),
        Metric("test_loss", "test loss"),
    ),
    axes=("rounds", "bytes_up"),
    arguments={
        name: hyper_representation.EXPERIMENT.arguments[name] for name in ("e3-aipod", "e-aipod")
    },
    steps=200,
    every=5,
)
