"""The server: it leads the run, and knows the starting point and the public test images."""

import jax
from flwr.app import Context

from aipod import flower
from aipod.experiments import load
from aipod.experiments.execute import Prepared
from aipod_digits.task import config, solver, task


def load_start(context: Context) -> flower.Start:
    chosen = config(context, clients=1)
    own = task(chosen)
    x0, y0 = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (own.x0, own.y0))
    prepared = Prepared(chosen, load(chosen.experiment), own, solver(context))
    return flower.Start(x0, y0, own.record, prepared)


app = flower.make_server_app(solver, load_start)
