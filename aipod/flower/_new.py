"""A complete Flower app to begin with: `aipod federation new`."""

import keyword
import re
from pathlib import Path

from aipod._misc.files import write_text
from aipod._misc.version import DISTRIBUTION

_PYPROJECT = """# A Flower app: `aipod federation run {folder}`, or `flwr run {folder}`.
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "A federation with aipod."
license = {{ text = "not decided yet" }}
requires-python = ">=3.11"
# Every machine installs it before it starts its node.
dependencies = ["{distribution}[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "{package}"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
outer-steps = 12
every = 1
seed = 0
# How many clients a round needs (0: all), and how long it waits, in seconds.
min-nodes = 0
round-timeout = 300.0
wait = 600.0
# Where the server writes: a run folder for `aipod report`. `aipod federation run` chooses one.
run-dir = ""
resume-from = ""
"""

_TASK = '''"""What server and clients must agree on: the losses, the solver and the starting point.

Replace it by your own problem. Here each client has a ridge regression; x are the logarithms of the
penalties, chosen on validation data, and y the coefficients.
"""

import jax.numpy as jnp

import aipod

x0, y0 = jnp.full(3, -2.0), jnp.zeros(3)
solver = aipod.E3AiPOD()


def error(y, batch):
    features, values = batch
    return jnp.mean((features @ y - values) ** 2)


def upper(x, y, batch):
    """One client's loss on validation data."""
    return error(y, batch)


def lower(x, y, batch):
    """One client's loss on training data."""
    return error(y, batch) + jnp.sum(jnp.exp(x) * y**2)
'''

_CLIENT = '''"""A client: it reads its own data, which never leave it."""

import jax
import numpy as np

import aipod.flower
from {package}.task import lower, solver, upper, x0, y0


def read_my_data(index):
    """Training and validation data: replace it by what reads yours."""
    rng = np.random.default_rng(index)
    features = rng.normal(size=(100, 3))
    data = features, features @ np.array([1.0, 0.0, -1.0]) + 0.1 * rng.normal(size=100)
    return jax.tree.map(lambda part: part[:80], data), jax.tree.map(lambda part: part[80:], data)


def load_client(context):
    node = context.node_config
    index, clients = int(node["partition-id"]), int(node["num-partitions"])
    train, validation = read_my_data(index)
    return aipod.flower.Client(
        upper, lower, validation, train, batch_size=16, x=x0, y=y0, index=index, clients=clients
    )


app = aipod.flower.make_client_app(load_client, solver)
'''

_SERVER = '''"""The server: it leads the run, and never sees data."""

import logging

import jax.numpy as jnp
import numpy as np

import aipod.flower
from {package}.task import error, solver, x0, y0


def public_data():
    """A few examples that everybody may see, to measure the model on."""
    features = np.random.default_rng(1000).normal(size=(200, 3))
    return features, features @ np.array([1.0, 0.0, -1.0])


features, values = map(jnp.asarray, public_data())


def record(x, y):
    """What is measured of the model; x and y have a client axis of length 1."""
    return {{"test_error": error(y[0], (features, values)), "penalty": jnp.exp(x[0]).sum()}}


def load_start(context):
    return aipod.flower.Start(x0, y0, record, name="{name}")


def on_finish(solution):
    """What to do with the result; the run folder has it too, as model.npz."""
    logging.getLogger("flwr").info("x = %s, y = %s", solution.x[0], solution.y[0])


app = aipod.flower.make_server_app(solver, load_start, on_finish=on_finish)
'''

_FILES = {
    "pyproject.toml": _PYPROJECT,
    ".gitignore": "__pycache__/\nruns/\nfederation/\n",
    "{package}/__init__.py": '"""A federation with aipod."""\n',
    "{package}/task.py": _TASK,
    "{package}/client_app.py": _CLIENT,
    "{package}/server_app.py": _SERVER,
}


def write_app(folder: Path) -> None:
    """Writes a complete app into a new folder, named after it."""
    name = folder.absolute().name
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ValueError(
            f"{name!r} cannot be the name of an app: use small letters, digits and -, and begin "
            "with a letter."
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in ("aipod", "flwr", "jax", "numpy"):
        raise ValueError(f"{name!r} cannot be the name of an app: Python uses it already.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: choose another name.")
    names = {
        "name": name.replace("_", "-"),
        "package": package,
        "folder": name,
        "distribution": DISTRIBUTION,
    }
    for path, text in _FILES.items():
        place = folder / path.format(**names)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text if path.endswith(("task.py", "ignore")) else text.format(**names))
