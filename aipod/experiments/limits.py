"""What the value of an experiment's option must keep to."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limit:
    """`words` go on after "must", in the error that a value outside gets."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: int) -> Limit:
    return Limit(f"be at least {least}", lambda value: value >= least)


POSITIVE = Limit("be a positive number", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Limit("be 0 or more", lambda value: 0 <= value < math.inf)
SHARE = Limit("lie in (0, 1]", lambda value: 0 < value <= 1)


def check_limits(options: Any) -> None:
    """Raises `ValueError` for the first option outside its limit; an option of None has none."""
    for field in dataclasses.fields(options):
        limit, value = field.metadata.get("limit"), getattr(options, field.name)
        if limit is not None and value is not None and not limit.holds(value):
            raise ValueError(f"{field.name} must {limit.words}, got {value}.")
