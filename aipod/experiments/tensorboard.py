"""Writes TensorBoard event files during a run."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from aipod._misc.extras import install
from aipod.solving import History


def require_tensorboard() -> None:
    """Raises `ValueError` if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(f"--tensorboard needs tensorboardX; to add it: {install('tensorboard')}")


class EventWriter:
    """Writes one scalar for each metric and recorded step.

    A resumed run empties the folder first, because its checkpoint holds the whole history.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder), write_to_disk=True)
        self._written = 0

    def write(self, history: History) -> None:
        """Writes the rows that are new since the last call."""
        steps = history["step"]
        for row in range(self._written, len(steps)):
            for name, column in history.items():
                if name != "step" and column.ndim == 1:
                    self._writer.add_scalar(name, float(column[row]), int(steps[row]))
        self._written = len(steps)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
