"""What must hold before the file of a user's task is imported: it may make arrays at its top."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from aipod.experiments.config import assignments, read


def settle(words: Sequence[str]) -> None:
    """Sets double precision and the number of CPU devices that a line asks for.

    What is wrong in the line is left to the verb, which parses it later.

    **Arguments:**

    - `words`: the line, with `--name=value` split in two.
    """
    x64 = None
    for found in _settings(words):
        x64 = found.get("x64", x64)
    if isinstance(x64, bool):
        jax.config.update("jax_enable_x64", x64)
    for before, word in itertools.pairwise(words):
        if before == "--mesh" and word.isdecimal() and int(word) > 0:
            with contextlib.suppress(RuntimeError):  # JAX has started already
                jax.config.update("jax_num_cpu_devices", int(word))


def _settings(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The settings in the file, by options and by --set; later ones win."""
    pairs = list(itertools.pairwise([*words, ""]))
    for before, word in pairs:
        path = {"--config": Path(word), "--out": Path(word) / "config.toml"}.get(before)
        if path is not None and (before == "--config" or "--resume" in words):
            with contextlib.suppress(ValueError, OSError):
                yield read(path)
    for word in words:
        if word in ("--x64", "--no-x64"):
            yield {"x64": word == "--x64"}
    for before, word in pairs:
        if before == "--set":
            with contextlib.suppress(ValueError):
                yield assignments([word])
