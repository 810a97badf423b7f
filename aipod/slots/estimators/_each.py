"""Another estimator for each slot."""

from typing import Any

import equinox as eqx

from aipod.slots.estimators._base import AbstractEstimator, Plain


class Estimators(eqx.Module):
    """An estimator for each slot; None for plain minibatches.

    **Arguments:**

    - `lower`: of grad_y g.
    - `adjoint`: of grad_yy g z and of grad_y f.
    - `upper`: of grad_x f and of the part of the hypergradient that comes through y.

    !!! example
        ```python
        estimator = aipod.Estimators(lower=aipod.STORM(0.1), upper=aipod.STORM(0.1))
        ```
    """

    lower: AbstractEstimator | None = None
    adjoint: AbstractEstimator | None = None
    upper: AbstractEstimator | None = None

    def __check_init__(self) -> None:
        for name in ("lower", "adjoint", "upper"):
            check_estimator(getattr(self, name), name)


# What solvers take: one for all slots, or one for each.
EstimatorLike = AbstractEstimator | Estimators


def check_estimator(estimator: Any, name: str) -> None:
    """Raises `ValueError` unless it is an estimator, or None."""
    if estimator is not None and not isinstance(estimator, AbstractEstimator):
        raise ValueError(
            f"{name} must be an estimator, such as aipod.SAGA(), got {type(estimator).__name__}."
        )


def for_each(estimator: Any) -> Estimators:
    """One estimator for all slots, or as they are."""
    if estimator is None or isinstance(estimator, Estimators):
        return estimator or Estimators()
    check_estimator(estimator, "estimator")
    return Estimators(estimator, estimator, estimator)


def or_plain(estimator: AbstractEstimator | None) -> AbstractEstimator:
    """An estimator; the plain one for None."""
    return Plain() if estimator is None else estimator
