"""Step sizes that `check` suggests for x, and what a move of x does to the lower level."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._hypergradient import exact_hypergradient, exact_lower, hypergradient
from aipod._misc.tree import cast_like
from aipod.diagnose._findings import Notes
from aipod.diagnose._lanczos import spectrum
from aipod.diagnose._measure import norm
from aipod.problem import Bilevel, draw
from aipod.slots.adjoint import Neumann

# Steps of gradient descent on F by which a step size is tried, and how often it may be halved.
_TRIALS, _HALVINGS = 5, 30
# The first step moves x by this share of itself, where nothing better is known; the longest by the
# other.
_FIRST_SHARE, _LONGEST_SHARE = 0.01, 1.0
# Terms of the series behind the first step.
_TERMS = 50
# How far x is moved to see whether the curvature depends on it, and from which factor on it does.
_PROBE, _DEPENDS = 0.1, 2.0


def tried_step(problem: Bilevel, x: PyTree, y0: PyTree, lr: float) -> float | None:
    """The longest of lr, lr / 2, ... with which gradient descent on F never goes up; or None.

    F may be far from the quadratic that its curvature at x suggests.
    """
    batch = draw(problem.upper_samples, jax.random.key(0))

    def value(point: PyTree) -> float:
        return float(problem.upper(point, exact_lower(problem, point, y0), batch))

    upper_set = problem.upper_set
    size = max(norm(x), 1.0)
    first = norm(upper_set.tangent(upper_set.riesz(exact_hypergradient(problem, x, y0))))
    if first > 0:
        lr = min(lr, _LONGEST_SHARE * size / first)
    for _ in range(_HALVINGS):
        point, before, down = x, value(x), True
        for _ in range(_TRIALS):
            try:
                slope = upper_set.riesz(exact_hypergradient(problem, point, y0))
                point = upper_set.project(optax.tree.add_scale(point, -lr, slope))
                now = value(point)
            except RuntimeError:
                now = math.inf
            down = now <= before + 1e-12 * abs(before)
            if not down:
                break
            before = now
        if down:
            return lr
        lr /= 2
    return None


def first_step(problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray) -> float | None:
    """The step that moves x by a hundredth of itself; None where x or the hypergradient is 0."""
    # A series is rough, but never fails, whatever the size and the types.
    slope = hypergradient(problem, x, y, Neumann(_TERMS), key=key)
    upper_set = problem.upper_set
    along, size = norm(upper_set.tangent(upper_set.riesz(slope))), norm(x)
    found = _FIRST_SHARE * size / along if along > 0 else 0.0
    return found if 0 < found < math.inf else None


def check_dependence(
    notes: Notes, problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray
) -> None:
    """Whether the curvature of the lower level changes when x moves a little."""
    here = max(abs(notes.numbers["lower_curvature"].whole.smallest), _largest(notes))
    upper_set = problem.upper_set
    direction = upper_set.tangent(optax.tree.random_like(key, x, jax.random.normal))
    length = norm(direction)
    if not here > 0 or length == 0:
        return
    entries = sum(leaf.size for leaf in jax.tree.leaves(x))
    reach = _PROBE * max(norm(x), math.sqrt(entries)) / length
    factors = []
    for sign in (1.0, -1.0):
        moved = optax.tree.add_scale(x, sign * reach, direction)
        moved = cast_like(moved, x)
        there = spectrum(problem, moved, _feasible(problem, y, moved), key)
        found = max(abs(there.smallest), abs(there.largest))
        factors.append(found / here if math.isfinite(found) else math.inf)
    factor = max(factors)
    if factor < _DEPENDS:
        notes.ok(
            "curvature and x",
            f"moving x by a tenth changes the largest curvature {factor:.2g}-fold at most.",
        )
        return
    notes.warning(
        "curvature and x",
        f"moving x by a tenth makes the largest curvature {factor:.3g} times as large: a fixed "
        "lower_lr that is right here diverges there.",
        "leave lower_lr and adjoint_lr at aipod.Curvature(), which follows it, and take short "
        "steps on x.",
    )


def _largest(notes: Notes) -> float:
    return abs(notes.numbers["lower_curvature"].whole.largest)


@eqx.filter_jit
def _feasible(problem: Bilevel, y: PyTree, x: PyTree) -> PyTree:
    return cast_like(problem.lower_set.project(y, x), y)


def check_repeats(notes: Notes, name: str, problem: Bilevel, x: PyTree, y: PyTree) -> None:
    """Whether an objective gives the same value twice: if not, a compiled step freezes it."""
    objective = getattr(problem, name)
    batch = draw(getattr(problem, f"{name}_samples"), jax.random.key(0))
    first, second = (_plain(objective(x, y, batch)) for _ in range(2))
    if first == second or (math.isnan(first) and math.isnan(second)):
        return
    notes.error(
        name,
        f"{name} gives {first:.6g} and then {second:.6g} for the same x, y and batch.",
        "let it depend on its arguments alone: what it reads elsewhere (NumPy's random numbers, a "
        "counter, a list that grows) is read once, when the step is compiled, and never again.",
    )


def _plain(value: Array) -> float:
    return float(jnp.asarray(value))
