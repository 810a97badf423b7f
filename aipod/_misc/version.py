"""The version of the library, which pyproject.toml alone states."""

import importlib.metadata

# The distribution; the name `aipod` on the public index belongs to another project.
DISTRIBUTION = "aipod-jax"

try:
    __version__ = importlib.metadata.version(DISTRIBUTION)
except importlib.metadata.PackageNotFoundError:
    # A source tree on the path that nobody installed.
    __version__ = "0+unknown"
