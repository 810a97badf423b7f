"""The parts of an experiment: a problem, its metrics, its options and what it compares."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import PyTree

from aipod.experiments import values
from aipod.experiments.limits import Limit
from aipod.experiments.values import Plain
from aipod.problem import Bilevel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column of the history, and how tables, figures and the report show it.

    `log`: whether its axis is logarithmic; None for one that fits what was recorded.
    """

    name: str
    label: str
    log: bool | None = True
    better: Literal["smaller", "larger"] = "smaller"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of the result, which a run saves and the report shows.

    - `draw`: (figure, x, y) draws on an empty Matplotlib figure; x and y lie on their sets.
    - `caption`: one or two sentences about what it shows.
    - `size`: width and height in inches.
    - `course`: (figure, columns) draws beside it how the run came there.
    """

    draw: Callable[["Figure", PyTree, PyTree], None]
    caption: str
    size: tuple[float, float] = (7.4, 3.6)
    course: Callable[["Figure", Columns], None] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem with its starting point and its measurements.

    - `record`: (x, y) -> dictionary of arrays, compiled along with the solver.
    - `derive`: columns -> further columns, computed after the run.
    - `picture`: drawn at the end of a run.
    - `metrics`, `axes`: in place of the experiment's, as `Experiment` has them.
    """

    problem: Bilevel
    x0: PyTree
    y0: PyTree
    record: Callable[[PyTree, PyTree], dict[str, Any]]
    derive: Callable[[Columns], dict[str, np.ndarray]] = lambda columns: {}
    picture: Picture | None = None
    metrics: tuple[Metric, ...] = ()
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """One column of the comparison's figure; the others are compared with the first variant.

    A variant is a solver with arguments of its own, `e-aipod:lower_prob=0.1:upper_steps=2`.
    """

    title: str
    variants: tuple[str, ...]


def varied(argument: str, chosen: Sequence[Plain]) -> tuple[str, ...]:
    """Variants that differ in one argument, as in `varied("e-aipod:lower_prob", (1, 0.5))`."""
    return tuple(f"{argument}={value}" for value in chosen)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A curve from another source, drawn as a dotted line in the panels with these titles."""

    panels: tuple[str, ...]
    label: str
    columns: Columns


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment of the command.

    - `options`: a frozen dataclass whose fields are made by `option`.
    - `build`: options -> Task.
    - `panels`: options -> what `aipod compare` shows by default.
    - `metrics`: what is shown; the first one is the main metric.
    - `axes`: the columns to draw against; the first one is the cost that the comparison counts.
    - `arguments`: the default arguments of each solver; the first solver is the default.
    - `steps`, `every`: outer steps, and how often to record.
    - `references`: options -> curves from other sources, for the comparison's figure.
    - `about`: one line for the report.
    - `digest`: of the file that a task of one's own is in; `config.toml` holds it.
    - `folder`: the beginning of the names of new folders; the experiment's name by default.
    """

    name: str
    options: type
    build: Callable[[Any], Task]
    panels: Callable[[Any], tuple[Panel, ...]]
    metrics: tuple[Metric, ...]
    axes: tuple[str, ...]
    arguments: Mapping[str, Mapping[str, Plain]]
    steps: int
    every: int = 1
    references: Callable[[Any], tuple[Reference, ...]] = lambda options: ()
    about: str = ""
    digest: str | None = None
    folder: str = ""

    @property
    def solver(self) -> str:
        """The default solver."""
        return next(iter(self.arguments))


def option(default: Any, help: str, limit: Limit | None = None) -> Any:
    """A field of an experiment's options: its default, its line in `--help`, and its limit.

    The options' `__post_init__` must call `check_limits`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "limit": limit})


def checks(options: type) -> dict[str, Callable[[Any, str], Plain]]:
    """Returns the function that checks each option, chosen by the type of its field."""
    plain: dict[type, Callable[[Any, str], Plain]] = {
        int: values.whole,
        float: values.number,
        bool: values.flag,
        str: values.text,
    }
    hints = typing.get_type_hints(options)
    found: dict[str, Callable[[Any, str], Plain]] = {}
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):  # such as `str | None`
            hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        if typing.get_origin(hint) is Literal:
            found[field.name] = values.choice(*typing.get_args(hint))
        else:
            found[field.name] = plain[hint]
    return found
