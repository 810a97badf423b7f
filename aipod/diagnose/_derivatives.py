"""The objectives of a problem: values, gradients, the lower curvature and the hypergradient."""

import math
from typing import Any

import jax
from jaxtyping import PRNGKeyArray, PyTree

from aipod._hypergradient import exact_lower, hypergradient
from aipod._misc.tree import all_finite
from aipod.diagnose._findings import LowerCurvature, Notes, first_line
from aipod.diagnose._lanczos import kernel_spectrum, spectrum
from aipod.diagnose._measure import (
    gradient_error,
    hypergradient_error,
    precision,
    same_batch,
    upper_curvature,
    values_and_gradients,
)
from aipod.diagnose._steps import tried_step
from aipod.problem import Bilevel, draw
from aipod.sets._inputs import total_size
from aipod.slots.adjoint import ConjugateGradient

# From these on y and the adjoint follow x too slowly for many a run: where the lower level bends
# unevenly on Ker A, and where the whole space, or a client, bends more than Ker A at its least.
_ILL_CONDITIONED, _UNLIKE = 1e4, 300.0


def check_values(
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


def check_gradients(
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


def check_curvature(
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
    elif kernel and whole.largest > _UNLIKE * kernel.smallest:
        what = "the clients' data" if problem.lower_set.per_client else "what A fixes"
        notes.warning(
            name,
            f"{words} Local steps are made for the largest of these; where Ker A bends least, y "
            f"needs some {whole.largest / kernel.smallest:.3g} of them.",
            f"bring {what} to the scale of the rest, or make many more outer steps with more "
            "lower_steps and adjoint_steps; see solution.converged.",
        )
    else:
        notes.ok(name, words)


def check_hypergradient(
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
    lr = tried_step(problem, x, y0, 1 / steepest) if right and steepest > 0 else None
    if lr is not None:
        notes.numbers["suggested"] = {"upper_lr": lr}


def _batch(problem: Bilevel, name: str) -> Any:
    return draw(getattr(problem, f"{name}_samples"), jax.random.key(0))


def _relative(error: float) -> str:
    return "hidden by rounding" if math.isnan(error) else f"{error:.1g}"
