"""`check`: what is wrong with a problem, and what to do about it, before a solver meets it."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from aipod._misc.keys import as_key
from aipod._misc.tree import is_concrete
from aipod.diagnose._bounds import along_bounds, check_bounds, in_a_corner, unbounded
from aipod.diagnose._derivatives import (
    check_curvature,
    check_gradients,
    check_hypergradient,
    check_values,
)
from aipod.diagnose._findings import LowerCurvature, Notes, Report
from aipod.diagnose._measure import precision
from aipod.diagnose._parts import check_fit, check_graph, check_samplers, check_set
from aipod.diagnose._steps import check_dependence, check_repeats, first_step
from aipod.problem import Bilevel
from aipod.sets._inputs import total_size

# Above this many unknowns, solving the lower level to full precision several times takes long.
_MODEST = 1000


def check(problem: Bilevel, x0: PyTree, y0: PyTree, *, key: PRNGKeyArray) -> Report:
    """Examines a problem and says what to fix; a bad problem gives a report, never an exception.

    Values, gradients and curvatures are computed at the projections of x0 and y0, with the
    samplers' expectations, or with one batch where a sampler has none. Convexity is tested at that
    point only, the largest curvature also a little away from it.

    **Arguments:**

    - `problem`, `x0`, `y0`: as `solve` takes them.
    - `key`: draws batches and the directions of the finite differences.

    !!! example
        ```python
        report = aipod.check(problem, x0, y0, key=jax.random.key(0))
        print(report)
        report.suggested["lower_lr"]
        ```
    """
    if not is_concrete((x0, y0, key, jnp.zeros(()))):
        raise ValueError(
            "check was called inside jit, vmap or grad: call it outside, where it can look at "
            "numbers."
        )
    notes = Notes()
    keys = jax.random.split(as_key(key), 4)
    start = notes.attempt("fit", check_fit, problem, x0, y0)
    if start is None:
        return notes.report()
    x = notes.attempt("upper_set", check_set, "upper_set", "x0", problem.upper_set, start[0])
    if x is None:
        return notes.report()
    y = notes.attempt("lower_set", check_set, "lower_set", "y0", problem.lower_set, start[1], x)
    notes.attempt("graph", check_graph, problem)
    batches = notes.attempt("samples", check_samplers, problem, keys[0])
    if y is None or batches is None:
        return notes.report()
    fixed, sampled, known = batches
    for name in ("upper", "lower"):
        notes.attempt(name, check_values, name, fixed, sampled, x, y)
        notes.attempt(name, check_repeats, name, fixed, x, y)
    if not notes.report().ok:
        return notes.report()  # derivatives of what is not finite, or off the set, mean nothing
    for name in ("upper", "lower"):
        notes.attempt(f"{name} gradient", check_gradients, name, fixed, x, y, keys[1])
    notes.attempt("lower curvature", check_curvature, unbounded(fixed, y, x), x, y, keys[2])
    corner = in_a_corner(fixed, x)
    fixed, sampled = along_bounds(fixed, x), along_bounds(sampled, x)
    if notes.report().ok:
        notes.attempt("curvature and x", check_dependence, fixed, x, y, keys[2])
    reason = _why_not_exact(notes.report(), known, x, y, corner=corner)
    if not (problem.lower_set.affine or reason):
        notes.attempt("bounds", check_bounds, fixed, x, y)
        if not notes.numbers.get("strictly_complementary", True):
            reason = "F has a kink here"
    if reason:
        notes.ok("hypergradient", f"not compared with finite differences: {reason}.")
    else:
        notes.attempt("hypergradient", check_hypergradient, fixed, x, y, keys[3])
    if reason and notes.report().ok:
        notes.attempt("step sizes", _rough_step, sampled, x, y, keys[3])
    _conclude(notes, reason)
    return notes.report()


def _why_not_exact(report: Report, known: bool, x: PyTree, y: PyTree, *, corner: bool) -> str:
    """Why y*(x) cannot be solved for; empty where it can."""
    if not report.ok:
        return "it needs the errors above mended"
    if not known:
        return "it needs the samplers' expectations"
    if total_size((x, y)) > _MODEST:
        return f"more than {_MODEST} unknowns make it slow"
    if precision(x, y) > 1e-10:
        return "it needs float64 (jax_enable_x64, and x0 and y0 in float64)"
    if report.dimensions["upper_set"] == 0:
        return "the upper set is a single point"
    if corner:
        return "x0 is in a corner of the upper set, where every direction leaves a bound"
    return ""


def _conclude(notes: Notes, reason: str) -> None:
    """Suggests step sizes: 1 / l for the largest curvature l of each level."""
    suggested = notes.numbers.setdefault("suggested", {})
    curvature: LowerCurvature | None = notes.numbers.get("lower_curvature")
    if curvature is not None:
        steepest = max(abs(curvature.whole.smallest), abs(curvature.whole.largest))
        if 0 < steepest < math.inf:
            suggested |= {"lower_lr": 1 / steepest, "adjoint_lr": 1 / steepest}
    words = ", ".join(f"{name}={value:.3g}" for name, value in suggested.items()) or "none"
    if "upper_lr" not in suggested:
        words += "; no upper_lr: F is flat here, or x is 0 and does not tell its scale"
    elif reason:
        words += "; upper_lr moves x by a hundredth in the first step, and no more is known of it"
    else:
        words += "; upper_lr was tried on F for a few steps"
    notes.ok("step sizes", f"{words}. Without them every solver finds its own.")


def _rough_step(notes: Notes, problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray) -> None:
    found = first_step(problem, x, y, key)
    if found is not None:
        notes.numbers.setdefault("suggested", {})["upper_lr"] = found
