"""The machine and the versions that a run used, without anything about who owns the machine."""

import importlib.metadata
import os
import platform

import jax

from aipod._misc.version import __version__


def environment() -> dict[str, str | int]:
    device = jax.devices()[0]
    found: dict[str, str | int] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "device": f"{device.device_kind} ({device.platform})",
        "devices": jax.device_count(),
        "aipod": __version__,
    }
    for package in ("jax", "jaxlib", "equinox", "lineax", "optax", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
