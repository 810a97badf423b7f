"""What a client has given away so far, on its disk: over all runs, and over all restarts."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from aipod._misc.files import append_private, narrow_files, private_folder, read_private, write_text
from aipod.flower._accounting import epsilon_of

# No run can have this name, so no run's folder is this one.
FOLDER = ".privacy"


class BudgetError(ValueError):
    """A client has spent its privacy budget: it sends nothing any more."""


class Account:
    """The releases of one client, in a file that is written before anything leaves.

    It belongs to the client and not to a run: the server chooses the names of runs.
    """

    def __init__(self, folder: Path, index: int) -> None:
        private_folder(folder)
        place = private_folder(folder / FOLDER)
        narrow_files(place)
        self._path = place / f"client-{index}.json"

    def read(self) -> tuple[int, float]:
        """How many releases there were, and the sum of their mu^2."""
        if not os.path.lexists(self._path):
            return 0, 0.0
        try:
            found = json.loads(read_private(self._path))
            releases, spent = int(found["releases"]), float(found["spent"])
            if releases < 0 or not 0 <= spent < math.inf:
                raise ValueError("a number is out of range")
        except (ValueError, KeyError, TypeError) as error:
            if "symbolic link" in str(error):
                raise
            raise ValueError(
                f"the privacy account {self._path} is damaged ({error}): bring it back from a "
                "backup. Without one this client cannot say what it has given away already."
            ) from None
        return releases, spent

    def spend(self, mu: float, budget: float | None, delta: float, least: int = 0) -> int:
        """Counts one release before it leaves, and returns its number.

        Raises `BudgetError`, and counts nothing, where it would exceed the budget; `ValueError`
        where there were fewer releases than `least`, which are known of.
        """
        with self._locked():
            releases, spent = self.read()
            if releases < least:
                raise ValueError(
                    f"the privacy account {self._path} counts {releases} releases, and there were "
                    f"{least} at least: bring its newest version back. Nothing leaves until then."
                )
            total = spent + mu**2
            if budget is not None and (reached := epsilon_of(math.sqrt(total), delta)) > budget:
                raise BudgetError(
                    f"the privacy budget is spent: after {releases} releases one more would make "
                    f"epsilon {reached:.4g}, and the budget is {budget:g} at delta {delta:g}. "
                    "Nothing leaves this client any more."
                )
            content = {"releases": releases + 1, "spent": total}
            write_text(self._path, json.dumps(content), private=True)
        return releases + 1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Two runs at once must not count as one."""
        with append_private(self._path.with_suffix(".lock")) as file:
            try:
                import fcntl
            except ImportError:  # Windows, where Flower does not run nodes for several runs at once
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
