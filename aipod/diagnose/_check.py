"""`check`: what is wrong with a problem, and what to do about it, before a solver meets it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._hypergradient import exact_lower, hypergradient
from aipod._misc.tree import all_finite, cast_like
from aipod.diagnose._findings import LowerCurvature, Notes, Report, count, first_line
from aipod.diagnose._lanczos import kernel_spectrum, spectrum
from aipod.diagnose._measure import (
    constraints,
    gradient_error,
    hypergradient_error,
    norm,
    precision,
    same_batch,
    upper_curvature,
    values_and_gradients,
)
from aipod.problem import Bilevel, Constant, Sampler, draw, expected
from aipod.sets import AbstractSet
from aipod.sets._base import largest, total_size
from aipod.slots.adjoint import ConjugateGradient

# Above this many unknowns, solving the lower level to full precision several times takes long.
_MODEST = 1000
_ILL_CONDITIONED = 1e4


def check(problem: Bilevel, x0: PyTree, y0: PyTree, *, key: PRNGKeyArray) -> Report:
    """Examines a problem and says what to fix; a bad problem gives a report, never an exception.

    Values, gradients and curvatures are taken where x0 and y0 project to, on the samplers'
    expectations, or on one batch where a sampler has none. Convexity is seen at that point only.

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
    notes = Notes()
    keys = jax.random.split(key, 4)
    start = notes.attempt("fit", _check_fit, problem, x0, y0)
    if start is None:
        return notes.report()
    x = notes.attempt("upper_set", _check_set, "upper_set", "x0", problem.upper_set, start[0])
    if x is None:
        return notes.report()
    y = notes.attempt("lower_set", _check_set, "lower_set", "y0", problem.lower_set, start[1], x)
    batches = notes.attempt("samples", _check_samplers, problem, keys[0])
    if y is None or batches is None:
        return notes.report()
    fixed, sampled, known = batches
    for name in ("upper", "lower"):
        notes.attempt(name, _check_values, name, fixed, sampled, x, y)
    if not notes.report().ok:
        return notes.report()  # derivatives of what is not finite, or off the set, mean nothing
    for name in ("upper", "lower"):
        notes.attempt(f"{name} gradient", _check_gradients, name, fixed, x, y, keys[1])
    notes.attempt("lower curvature", _check_curvature, fixed, x, y, keys[2])
    reason = _why_not_exact(notes.report(), known, x, y)
    if reason:
        notes.ok("hypergradient", f"not compared with finite differences: {reason}.")
    else:
        notes.attempt("hypergradient", _check_hypergradient, fixed, x, y, keys[3])
    _conclude(notes, reason)
    return notes.report()


def _check_fit(notes: Notes, problem: Bilevel, x0: PyTree, y0: PyTree) -> PyTree | None:
    for name, tree in (("x0", x0), ("y0", y0)):
        if total_size(tree) == 0:
            notes.error(name, "holds no numbers.", f"pass {name} in the structure of a solution.")
            return None
        if not all_finite(tree):
            notes.error(name, "holds NaN or infinity.", "start from finite numbers.")
            return None
    try:
        problem.check(x0, y0)
    except ValueError as error:
        notes.error("fit", first_line(error), "nothing else can be checked before this is mended.")
        return None
    notes.ok("fit", f"x has {count(total_size(x0), 'variable')}, y has {total_size(y0)}.")
    return jax.tree.map(jnp.asarray, (x0, y0))


def _check_set(
    notes: Notes, name: str, start: str, set_: AbstractSet, point: PyTree, x: PyTree = None
) -> PyTree:
    rows, rank = constraints(set_, point)
    dimension = None if rank is None else total_size(point) - rank
    notes.numbers.setdefault("ranks", {})[name] = rank
    notes.numbers.setdefault("dimensions", {})[name] = dimension
    what = type(set_).__name__
    if rows:
        what += f", {count(rows, 'constraint')}"
    if rank is None or dimension is None:
        what += ", not factored"
    elif rank:
        what += f" of rank {rank}, {count(dimension, 'dimension')} left"
    eps, inside = precision(point), cast_like(set_.project(point, x), point)
    miss = largest(set_.residual(inside, x))
    # What a move of the point's own size does to the residual: rounding is relative to that.
    move = optax.tree.random_like(jax.random.key(0), inside, jax.random.normal)
    probe = optax.tree.add_scale(inside, max(1.0, largest(inside)), move)
    if miss <= 100 * eps**0.75 * largest(set_.residual(probe, x)):
        notes.ok(name, f"{what}; residual after projection {miss:.1g}.")
    else:
        notes.error(
            name,
            f"{what}; it is empty where x0 projects to: the nearest point misses by {miss:.3g}.",
            "make c - h(x) lie in the range of A for every x of the upper set: rows of A that "
            "repeat each other must ask for the same value.",
        )
    distance = norm(optax.tree.sub(inside, point))
    if distance <= eps**0.5 * (1 + norm(point)):
        notes.ok(start, f"in the {name}.")
    else:
        call = "project(y0, x0)" if set_.coupled else f"project({start})"
        notes.warning(
            start,
            f"{distance:.3g} away from the {name}; the checks below move it there first.",
            f"start from problem.{name}.{call}.",
        )
    return inside


def _check_samplers(
    notes: Notes, problem: Bilevel, key: PRNGKeyArray
) -> tuple[Bilevel, Bilevel, bool]:
    """The problem on its expectations, on one drawn batch, and whether the former are known."""
    keys = jax.random.split(key)
    drawn: list[Any] = []
    fixed: list[Any] = []
    known = True
    for name in ("upper_samples", "lower_samples"):
        samples: Sampler | None = getattr(problem, name)
        batch, other = (draw(samples, k) for k in keys)
        deterministic = same_batch(batch, other)
        drawn.append(Constant(batch))
        kind = "deterministic" if deterministic else "random"
        try:
            fixed.append(Constant(expected(samples)))
            notes.ok(name, "none." if samples is None else f"{kind}, with a known expectation.")
        except Exception as error:
            fixed.append(Constant(batch))
            known = known and deterministic
            if deterministic:
                notes.ok(name, "deterministic: two keys give the same batch.")
            else:
                notes.warning(
                    name,
                    "random, and its expectation is not known: the checks below see one batch. "
                    f"({first_line(error)})",
                    "give the sampler a method expected(); the exact reference values need it.",
                )
    parts = (problem.upper, problem.lower, problem.upper_set, problem.lower_set)
    return Bilevel(*parts, *fixed), Bilevel(*parts, *drawn), known


def _batch(problem: Bilevel, name: str) -> Any:
    return draw(getattr(problem, f"{name}_samples"), jax.random.key(0))


def _check_values(
    notes: Notes, name: str, fixed: Bilevel, sampled: Bilevel, x: PyTree, y: PyTree
) -> None:
    objective, words = getattr(fixed, name), []
    batches = {"in expectation": _batch(fixed, name), "on a sampled batch": _batch(sampled, name)}
    if same_batch(*batches.values()):
        batches = {"": _batch(fixed, name)}
    for where, batch in batches.items():
        value, slopes = values_and_gradients(objective, x, y, batch)
        parts = {"value": value, "gradient in x": slopes[0], "gradient in y": slopes[1]}
        bad = [part for part, leaf in parts.items() if not all_finite(leaf)]
        if bad:
            notes.error(
                name,
                f"{name}: {', '.join(bad)} NaN or infinite {where}".rstrip() + ".",
                "look for log, sqrt, a norm or a division at 0; jnp.where hides such a value but "
                "not its gradient, so guard the argument as well.",
            )
            return
        words.append(f"{float(value):.4g} {where}".rstrip())
    notes.ok(name, f"value {', '.join(words)}; gradients are finite.")


def _check_gradients(
    notes: Notes, name: str, problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray
) -> None:
    objective, batch, words = getattr(problem, name), _batch(problem, name), []
    eps, worst = precision(x, y), 0.0
    for index, variable in enumerate("xy"):
        error = gradient_error(objective, x, y, batch, index, jax.random.fold_in(key, index))
        notes.numbers.setdefault("gradient_errors", {})[f"{name}_{variable}"] = error
        worst = error if error > worst else worst
        words.append(f"{_relative(error)} in {variable}")
    value = f"relative error against finite differences: {', '.join(words)}."
    if eps > 1e-10:
        value += " (A rough check in float32; jax_enable_x64 makes it sharper.)"
    notes.expect(
        worst <= eps**0.25,
        f"{name} gradient",
        value,
        "the gradient is not that of the value: look for stop_gradient, custom_vjp or custom_jvp "
        "rules, rounding, argmax and casts to integers.",
    )


def _relative(error: float) -> str:
    return "hidden by rounding" if math.isnan(error) else f"{error:.1g}"


def _check_curvature(
    notes: Notes, problem: Bilevel, x: PyTree, y: PyTree, key: PRNGKeyArray
) -> None:
    name, size = "lower curvature", total_size(y)
    dimension = notes.numbers["dimensions"]["lower_set"]
    whole = spectrum(problem, x, y, key)
    kernel = whole if dimension == size else kernel_spectrum(problem, x, y, key)
    notes.numbers["lower_curvature"] = LowerCurvature(whole, kernel)
    words = f"{whole} on the whole space"
    if kernel is None:
        words += "; Ker A is {0}: the constraints alone determine y"
    elif kernel is not whole:
        words += f", {kernel} on Ker A"
    words += "."
    zero = 50 * precision(y) * max(abs(whole.smallest), abs(whole.largest))
    if not math.isfinite(whole.largest) or (kernel and not math.isfinite(kernel.largest)):
        notes.error(
            name,
            "the second derivative of lower in y is NaN or infinite.",
            "smooth lower: a norm or a power below 2 has no curvature at 0.",
        )
    elif kernel and kernel.smallest <= zero:
        notes.error(
            name,
            f"{words} The lower level is not strongly convex, and the hypergradient does not "
            "exist here.",
            "add a strongly convex term to lower, such as 0.5 * mu * ||y||^2 with mu above "
            f"{max(0.0, -kernel.smallest):.3g}, or give the adjoint a damping.",
        )
    elif whole.smallest <= zero:
        notes.warning(
            name,
            f"{words} Strongly convex on Ker A only: ProxSkip's skipped steps leave it.",
            "use AiPOD (lower_prob=1), not E-AiPOD or E2-AiPOD, or add 0.5 * mu * ||y||^2 with mu "
            f"above {max(0.0, -whole.smallest):.3g} to lower.",
        )
    elif kernel and kernel.largest > _ILL_CONDITIONED * kernel.smallest:
        notes.warning(
            name,
            f"{words} The condition number is {kernel.largest / kernel.smallest:.3g}, and the "
            "steps to take grow with it.",
            "rescale y or the data, add a strongly convex term to lower, or use the adjoint "
            "aipod.ConjugateGradient, which needs only its square root.",
        )
    else:
        notes.ok(name, words)


def _why_not_exact(report: Report, known: bool, x: PyTree, y: PyTree) -> str:
    """Why y*(x) is not solved for; empty where it may be."""
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
    return ""


def _check_hypergradient(
    notes: Notes, problem: Bilevel, x: PyTree, y0: PyTree, key: PRNGKeyArray
) -> None:
    eps = precision(x)
    try:
        y = exact_lower(problem, x, y0)
    except RuntimeError as unsolved:
        notes.error(
            "hypergradient",
            first_line(unsolved),
            "make lower strongly convex in y and better scaled, or pass a y0 nearer its solution.",
        )
        return
    gradient = hypergradient(problem, x, y, ConjugateGradient(rtol=eps**0.9))
    steepest = upper_curvature(problem, x, y0, gradient, key)
    batch = _batch(problem, "upper")
    error = hypergradient_error(problem, x, y0, gradient, steepest, batch, key)
    notes.numbers["hypergradient_error"] = error
    right = not error > eps**0.25
    notes.expect(
        right,
        "hypergradient",
        f"relative error against finite differences of F: {_relative(error)}.",
        "the second derivatives of lower are not those of its gradient, or F has a kink here: look "
        "for custom_vjp and custom_jvp rules in lower, and for a coupling with kinks.",
    )
    if right and steepest > 0:
        notes.numbers["suggested"] = {"upper_lr": 1 / steepest}


def _conclude(notes: Notes, reason: str) -> None:
    """The step sizes: 1 / l for the largest curvature l of each level."""
    suggested = notes.numbers.setdefault("suggested", {})
    curvature: LowerCurvature | None = notes.numbers.get("lower_curvature")
    if curvature is not None:
        steepest = max(abs(curvature.whole.smallest), abs(curvature.whole.largest))
        if 0 < steepest < math.inf:
            suggested |= {"lower_lr": 1 / steepest, "adjoint_lr": 1 / steepest}
    words = ", ".join(f"{name}={value:.3g}" for name, value in suggested.items()) or "none"
    if "upper_lr" in suggested:
        words += "; upper_lr is rough, from the curvature of F along its own gradient"
    else:
        words += f"; no upper_lr: {reason or 'the curvature of F is 0 here, or not known'}"
    notes.ok("step sizes", f"{words}.")
