"""Limits for the options of experiments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limit:
    """`holds` tests a value; `words` follow "must" in the error message."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: int) -> Limit:
    return Limit(f"be at least {least}", lambda value: value >= least)


POSITIVE = Limit("be a positive number", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Limit("be 0 or more", lambda value: 0 <= value < math.inf)
SHARE = Limit("lie in (0, 1]", lambda value: 0 < value <= 1)


def check_limits(options: Any) -> None:
    """Raises `ValueError` for the first option outside its limit; None is always accepted."""
    for field in dataclasses.fields(options):
        limit, value = field.metadata.get("limit"), getattr(options, field.name)
        if limit is not None and value is not None and not limit.holds(value):
            raise ValueError(f"{field.name} must {limit.words}, got {value}.")
