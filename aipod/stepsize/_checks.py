"""Checks of plain numbers, shared by everything that takes arguments."""

from typing import Any

import jax
import numpy as np


def check_steps(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a whole number, at least 1 and below 2**31."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}.")
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}.")


def as_number(value: Any, name: str) -> float | None:
    """The value of one real number; None while it is traced; `ValueError` for anything else."""
    if isinstance(value, jax.core.Tracer):
        return None
    if not isinstance(value, str | bytes):
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "fiu":
            return float(array)
    raise ValueError(f"{name} must be a number, got {_shown(value)}.")


def check_positive(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is one positive, finite number."""
    number = as_number(value, name)
    if number is not None and not 0 < number < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {number}.")


def check_not_negative(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is one finite number, 0 or more."""
    number = as_number(value, name)
    if number is not None and not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be 0 or more, got {number}.")


def check_at_least_one(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is one finite number, 1 or more."""
    number = as_number(value, name)
    if number is not None and not 1 <= number < float("inf"):
        raise ValueError(f"{name} must be at least 1, got {number}.")


def check_probability(value: Any, name: str) -> None:
    """Raises `ValueError` unless 0 < value <= 1."""
    number = as_number(value, name)
    if number is not None and not 0 < number <= 1:
        raise ValueError(
            f"{name} must be a probability in (0, 1], got {number}: 1 projects always."
        )


def check_relaxation(value: Any) -> None:
    """Raises `ValueError` unless 0 < value < 2."""
    number = as_number(value, "relaxation")
    if number is not None and not 0 < number < 2:
        raise ValueError(
            f"relaxation must be above 0 and below 2, got {number}: from 2 on corrections diverge."
        )


def check_share(value: Any, name: str) -> None:
    """Raises `ValueError` unless 0 <= value < 1."""
    number = as_number(value, name)
    if number is not None and not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {number}.")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str | bytes | bool):
        return repr(value)
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {shape}" if shape else "")
