"""The same problem with x in another unit and f multiplied."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.experiments.gallery.exhibit import Exhibit
from aipod.problem import Bilevel, Objective, rebuilt
from aipod.sets import AbstractSet
from aipod.sets._wrapped import AbstractWrapped


def in_units(exhibit: Exhibit, x_unit: Array, f_scale: float = 1.0) -> Exhibit:
    """The same problem with x_new = x_unit x and f_new = f_scale f; y and g stay as they are.

    Its solution is the old one in the new unit, and F's gradient is f_scale / x_unit times the
    old one.
    """
    if not (x_unit > 0 and f_scale > 0):
        raise ValueError(f"x_unit and f_scale must be positive, got {x_unit} and {f_scale}.")
    old, unit = exhibit.problem, jnp.asarray(x_unit, float)
    problem = Bilevel(
        upper=_seen(old.upper, unit, jnp.asarray(f_scale, float)),
        lower=_seen(old.lower, unit, jnp.ones(())),
        upper_set=Magnified(old.upper_set, unit),
        lower_set=Following(old.lower_set, unit) if old.lower_set.coupled else old.lower_set,
        upper_samples=old.upper_samples,
        lower_samples=old.lower_samples,
    )
    return dataclasses.replace(
        exhibit,
        problem=problem,
        x0=_scaled(exhibit.x0, x_unit),
        start=f_scale * exhibit.start,
        best=f_scale * exhibit.best,
        solution=_scaled(exhibit.solution, x_unit),
    )


def _scaled(tree: PyTree, factor: Array | float) -> PyTree:
    return jax.tree.map(lambda leaf: (leaf * factor).astype(jnp.result_type(leaf)), tree)


# The unit is an array, not a constant of the program: all units share one compiled program.
class _Loss(eqx.Module):
    """scale loss(x / unit, y, batch)."""

    loss: Callable[..., Array]
    unit: Array
    scale: Array

    def __call__(self, x: PyTree, y: PyTree, batch: Any) -> Array:
        value = self.loss(_scaled(x, 1 / self.unit), y, batch)
        return self.scale.astype(value.dtype) * value


class _Features(eqx.Module):
    """features(x / unit, batch)."""

    features: Callable[[PyTree, Any], PyTree]
    unit: Array

    def __call__(self, x: PyTree, batch: Any) -> PyTree:
        return self.features(_scaled(x, 1 / self.unit), batch)


def _seen(objective: Objective, unit: Array, scale: Array) -> Objective:
    """The objective for an x in the new unit; the features of a `Composite` stay features."""
    return rebuilt(
        objective,
        lambda loss: _Loss(loss, unit, scale),
        lambda features: _Features(features, unit),
        # Features have no unit of x.
        lambda head: _Loss(head, jnp.ones(()), scale),
    )


class Magnified(AbstractWrapped):
    """{unit x : x in base}."""

    base: AbstractSet
    unit: Array

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return _scaled(self.base.project(_scaled(y, 1 / self.unit), x), self.unit)

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return _scaled(self.base.anchor(x, like=like), self.unit)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.residual(_scaled(y, 1 / self.unit), x)

    def for_round(self, key: PRNGKeyArray) -> "Magnified":
        return Magnified(self.base.for_round(key), self.unit)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self.base.check(_scaled(y, 1 / self.unit), x, name=name)


class Following(AbstractWrapped):
    """A set that moves with x, for an x in another unit."""

    base: AbstractSet
    unit: Array

    @property
    def coupled(self) -> bool:
        return True

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.project(y, _scaled(x, 1 / self.unit))

    def anchor(self, x: PyTree = None, *, like: PyTree = None) -> PyTree:
        return self.base.anchor(_scaled(x, 1 / self.unit), like=like)

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self.base.residual(y, _scaled(x, 1 / self.unit))

    def emptiness(self, x: PyTree = None, like: PyTree = None) -> Array:
        return self.base.emptiness(_scaled(x, 1 / self.unit), like)

    def at(self, x: PyTree) -> AbstractSet:
        return self.base.at(_scaled(x, 1 / self.unit))

    def directions(self) -> AbstractSet:
        return self.base.directions()

    def for_round(self, key: PRNGKeyArray) -> "Following":
        return Following(self.base.for_round(key), self.unit)

    def check(self, y: PyTree, x: PyTree = None, *, name: str = "set") -> None:
        self.base.check(y, _scaled(x, 1 / self.unit), name=name)
