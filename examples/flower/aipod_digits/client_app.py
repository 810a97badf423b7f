"""A node: it holds its part of the images, and never sends an image.

A node of your own would read its own data here and return `aipod.flower.Client(...)`.
"""

from flwr.app import Context

from aipod import flower
from aipod_digits.task import config, solver, task


def load_client(context: Context) -> flower.Client:
    node = context.node_config
    whole = task(config(context, clients=int(node["num-partitions"])))
    return flower.client_of(whole.problem, whole.x0, whole.y0, index=int(node["partition-id"]))


def privacy(context: Context) -> flower.Privacy | None:
    """What the run asks for; the node's own `privacy-noise` and so on can only make it stricter."""
    clip, noise = (float(context.run_config[name]) for name in ("clip", "noise"))
    return flower.Privacy(clip, noise) if clip or noise else None


app = flower.make_client_app(load_client, solver, privacy=privacy)
