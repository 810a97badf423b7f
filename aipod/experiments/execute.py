"""One run from its configuration to its folder."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

import aipod
from aipod.experiments import load, solvers
from aipod.experiments.base import Columns, Experiment, Metric, Picture, Task
from aipod.experiments.config import RunConfig
from aipod.experiments.tensorboard import EventWriter
from aipod.runs._description import Description, Drawing
from aipod.runs._folder import RunFolder
from aipod.runs._results import write_results
from aipod.solving import Progress


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that is ready to start; its configuration has been checked."""

    config: RunConfig
    experiment: Experiment
    task: Task
    solver: Any

    def with_seed(self, seed: int) -> "Prepared":
        """The same objects with another seed, so that `solve` compiles nothing again."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, seed=seed))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.task.metrics or self.experiment.metrics

    def describe(self, clients: int | None = None) -> Description:
        """What the run folder says about this run.

        A federation on Flower learns from its nodes how many `clients` it has.
        """
        config, picture, drawing = self.config, self.task.picture, None
        if picture is not None:
            drawing = Drawing(functools.partial(picture_figure, picture), picture.caption)
        if clients is not None and "clients" in config.options:
            options = config.options | {"clients": clients}
            config = dataclasses.replace(config, options=options)
        return Description(
            experiment=config.experiment,
            solver=config.solver,
            seed=config.seed,
            toml=config.toml(),
            config=config.flat(),
            arguments=config.arguments,
            metrics=[dataclasses.asdict(metric) for metric in self.metrics],
            axes=self.task.axes or self.experiment.axes,
            derive=self.task.derive,
            picture=drawing,
            about=self.experiment.about,
        )


def picture_figure(
    picture: Picture, x: PyTree, y: PyTree, folder: Path, columns: Columns | None = None
) -> list[Path]:
    """Writes the experiment's own picture of where a run ended, as PNG and SVG."""
    # Matplotlib takes half a second to import, and most experiments have no picture.
    from aipod.runs._figures import save

    def draw(figure: Any) -> None:
        if picture.course is None or columns is None:
            picture.draw(figure, x, y)
            return
        left, right = figure.subfigures(1, 2)
        picture.draw(left, x, y)
        picture.course(right, columns)

    return save(folder, "picture", picture.size, draw)


def prepare(config: RunConfig, task: Task | None = None) -> Prepared:
    """Builds the problem (unless there is one already) and the solver."""
    jax.config.update("jax_enable_x64", config.x64)
    experiment = load(config.experiment)
    solver = solvers.make(config.solver, config.arguments)
    if task is None:
        task = experiment.build(experiment.options(**config.options))
    solver.init(task.problem, task.x0, task.y0)  # raises if problem and solver do not fit
    return Prepared(config, experiment, task, solver)


def devices_for(count: int) -> list[Any]:
    """So many devices; on a CPU they are made, where JAX has not started yet."""
    if count < 1:
        raise ValueError(f"--mesh must be a number of devices, at least 1, got {count}.")
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if len(found) < count:
        raise ValueError(f"--mesh asks for {count} devices, but JAX finds {len(found)}.")
    return found[:count]


def execute(
    run: Prepared,
    folder: RunFolder,
    *,
    resume: bool = False,
    front: Callable[[Progress], None] | None = None,
    tensorboard: bool = False,
    devices: list[Any] | None = None,
) -> dict[str, Any]:
    """Solves, writes metrics and summary into the folder, and returns the summary.

    `devices`: those over which the clients are spread, or the examples of each batch.
    """
    config, task = run.config, run.task
    mesh = None
    if devices is not None:
        axis = "batch" if task.problem.clients is None else "clients"
        mesh = jax.sharding.Mesh(np.array(devices), (axis,))
    events = EventWriter(folder.tensorboard) if tensorboard else None
    began = datetime.now(UTC).isoformat(timespec="seconds")

    def report(progress: Progress) -> None:
        if events is not None:
            events.write(progress.history)
        if front is not None:
            front(progress)

    try:
        solution = aipod.solve(
            task.problem,
            run.solver,
            task.x0,
            task.y0,
            config.steps,
            key=jax.random.key(config.seed),
            record=task.record,
            every=config.every,
            progress=report,
            checkpoint=folder.checkpoint,
            resume=resume,
            throw=False,
            mesh=mesh,
        )
    finally:
        if events is not None:
            events.close()
    return write_results(run.describe(), folder, solution, began)
