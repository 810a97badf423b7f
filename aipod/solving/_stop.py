"""When a run ends."""

import dataclasses
from collections.abc import Mapping

from aipod.stepsize import as_number, check_positive, check_steps


@dataclasses.dataclass(frozen=True)
class Stop:
    """When a run ends; whichever comes first.

    - `steps`: outer steps.
    - `seconds`: wall-clock time after compiling, looked at about twice a second.
    - `projections`: projections of all kinds together.
    - `tolerance`: {metric: value}; ends at the first recorded step where every named metric that
        `record` returns is at most its value.
    - `patience`: outer steps without a decrease of F. About each tenth of the run so far is looked
        at as one: F decreases in it where the hypergradients predict a decrease that is beyond its
        noise, two standard errors, and at least 1e-4 of that of the whole run.

    !!! example
        ```python
        stop = aipod.Stop(seconds=60, tolerance={"stationarity": 1e-6})
        ```
    """

    steps: int | None = None
    seconds: float | None = None
    projections: int | None = None
    tolerance: Mapping[str, float] | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "projections", "patience"):
            if getattr(self, name) is not None:
                check_steps(getattr(self, name), f"Stop: {name}")
        if self.seconds is not None:
            check_positive(self.seconds, "Stop: seconds")
        if self.tolerance is None:
            return
        if not isinstance(self.tolerance, Mapping):
            raise ValueError("Stop: tolerance names the metric, as in {'stationarity': 1e-6}.")
        for name, value in self.tolerance.items():
            number = as_number(value, f"Stop: the tolerance of {name!r}")
            if number is None or number != number:
                raise ValueError(f"Stop: the tolerance of {name!r} must be a number, got {value}.")
