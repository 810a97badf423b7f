"""The machine and the versions that a run used, without anything about who owns the machine."""

import importlib.metadata
import os
import platform

import jax

# The distribution is called aipod-jax; aipod was its name before.
_PACKAGES = {"aipod": ("aipod-jax", "aipod")} | {
    name: (name,) for name in ("jax", "jaxlib", "equinox", "lineax", "optax", "numpy")
}


def environment() -> dict[str, str | int]:
    device = jax.devices()[0]
    found: dict[str, str | int] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "device": f"{device.device_kind} ({device.platform})",
        "devices": jax.device_count(),
    }
    return found | {name: _version(names) for name, names in _PACKAGES.items()}


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
