"""What server and clients must agree on: the solver and the task, from the run configuration."""

from flwr.app import Context

from aipod.experiments import load, solvers
from aipod.experiments.base import Task
from aipod.experiments.config import RunConfig, assignments, resolve


def config(context: Context, clients: int) -> RunConfig:
    """The run as `aipod run hyper-representation` would have it."""
    given = context.run_config
    options = {
        "experiment": "hyper-representation",
        "solver": given["solver"],
        "steps": given["outer-steps"],
        "every": given["every"],
        "seed": given["seed"],
        "clients": clients,
        "data": given["data"],
        "hidden": given["hidden"],
        "batch_size": given["batch-size"],
        "partition": given["partition"],
    }
    if given["data-dir"]:
        options["data_dir"] = given["data-dir"]
    arguments = [text for text in str(given["arguments"]).split(",") if text.strip()]
    return resolve(options | assignments(arguments))


def solver(context: Context):
    """The same solver on the server and on every client."""
    chosen = config(context, clients=1)
    return solvers.make(chosen.solver, chosen.arguments)


def task(chosen: RunConfig) -> Task:
    experiment = load(chosen.experiment)
    return experiment.build(experiment.options(**chosen.options))
