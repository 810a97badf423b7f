"""Whether a run has converged, in numbers and in words."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from aipod.algorithms import Alternating, State, natural_way
from aipod.solving._extent import eps_of, flat_of, rounding_of, size_of, steeper_of

# |grad F| has to shrink to this share of what it was.
TOLERANCE = 1e-2
# y has settled when it moves, in the last window, by at most the first share of its whole way, and
# has not when it moves by more than the second.
_SETTLED, _MOVING = 1e-3, 2e-2
# Steps on y are as short as the curvature is large: from this growth on they do not reach y*.
_STEEPER = 1e8
# Fewer hypergradients than this say nothing about their noise.
_ENOUGH = 8
# Noise hides whether y and z lag behind x. They do not where the window is so many times as long as
# they need to follow it, along z and not along what is flatter still. Without noise a lag shows, by
# moves of y and by the residual of z, unless they need longer than the whole run.
_FOLLOWS = 10


@dataclasses.dataclass(frozen=True)
class Convergence:
    """What a run saw of its own convergence, without an extra sample, projection or round.

    The numbers come from the hypergradients h of the last `window` outer steps, about a tenth or
    two of the run. They are as right as h: where y lags behind x or z is inexact, they say how
    stationary the run looked from where it was.

    - `stationarity`: ||grad F(x)||^2 in the P_x norm, as `aipod.stationarity` gives it exactly. Of
        the last step where the problem has no noise; else an estimate with its `standard_error`,
        which in a ball of noise is right to a factor of about 3.
    - `start`: the largest value earlier in the run while y followed x, less several standard
        errors.
    - `trend`: the share of the whole predicted decrease of F that the last window made.
    - `window`: its outer steps.
    - `moving`: how far y still moved in it in one direction, as a share of its whole way.
    - `adjoint`: how far off the adjoint z was, relative to its size; None where nothing is known.
    - `convex`: False where the lower level was seen to bend down.
    - `converged`: True where |grad F| is, two standard errors included, at most a hundredth of what
        it was at its largest, y had settled and z was exact enough for that. False where it is
        larger, or y or z are too far off. None where that cannot be told, as in too much noise.
    - `reason`, `advice`: why, and what to do about it; empty where there is nothing to do.

    What could not be measured is None.

    !!! example
        ```python
        solution = aipod.solve(problem, solver, x0, y0, 100, key=jax.random.key(0))
        found: aipod.Convergence = solution.convergence
        found.stationarity, found.standard_error, found.converged
        ```
    """

    stationarity: float | None = None
    standard_error: float | None = None
    start: float | None = None
    trend: float | None = None
    window: int = 0
    moving: float | None = None
    adjoint: float | None = None
    convex: bool = True
    converged: bool | None = None
    reason: str = "it was not measured"
    advice: str = ""


def convergence_of(solver: Alternating, state: State, clients: int | None = None) -> Convergence:
    """The statement about a state.

    `clients`: how many there are, where the state is that of one of them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _measured(solver, state, clients)


def _measured(solver: Alternating, state: State, clients: int | None) -> Convergence:
    watch: Any = jax.tree.map(np.asarray, state.watch).unpacked()
    seen = solver.upper.seen(state.upper)
    pooled = jax.tree.map(lambda a, b: np.mean(a + b), watch.now, watch.before)
    window = round(float(pooled.steps))
    if seen is None or not window:
        why = "no step was made" if not window and seen is not None else Convergence.reason
        return Convergence(reason=why)
    unit, many = float(np.mean(watch.unit)), clients or watch.unit.size
    scale = unit**2 * many
    noisy = bool(np.any(watch.noisy))
    if noisy:
        value, error = (float(found) for found in pooled.estimate(unit))
        value = min(value, float(pooled.square) / window) * scale
        error = error * scale if window >= _ENOUGH else math.inf
    else:
        value, error = float(np.mean(watch.size)) * scale, 0.0
    error = math.hypot(error, rounding_of(state, seen) * many)
    if not math.isfinite(value):
        return Convergence()
    start = float(np.mean(watch.start)) * scale
    top = max(start, float(np.mean(watch.top)) * scale)
    if not noisy and int(watch.began) == 0:
        start = top = scale
    whole = float(np.mean(watch.decrease))
    way = float(natural_way(np.mean(watch.way), np.mean(watch.length)))
    drifted = math.sqrt(float(pooled.drifted()))
    found = Convergence(
        stationarity=value,
        standard_error=error,
        start=start,
        trend=float(pooled.decrease) / whole if whole > 0 else None,
        window=window,
        moving=drifted / way if way > 0 else 0.0,
        adjoint=math.sqrt(max(pooled.left, 0.0) / pooled.right) if pooled.right > 0 else None,
        convex=not bool(np.any(watch.bent)),
    )
    reach = max(float(np.mean(watch.reach)), float(pooled.distance) / window) * watch.unit.size
    still = math.sqrt(reach) <= 100 * eps_of(state) * size_of(state.x)
    away = 0.0
    if seen.off is not None and reach > 0:
        away = math.sqrt(float(np.mean(seen.off)) * watch.unit.size / reach)
    right, larger = float(pooled.right) / window, float(np.mean(watch.adjoint))
    # Relative to z where the run started: where z itself has become small, so has its error.
    bias = (found.adjoint or 0.0) * (math.sqrt(right / larger) if 0 < right < larger else 1.0)
    flat, steeper = flat_of(state), steeper_of(state)
    lag = _lag(solver, state, float(pooled.pull) / window)
    late = lag * _FOLLOWS > window if noisy else lag > int(state.step)
    return _judged(
        found,
        solver,
        bias,
        away,
        top,
        flat=flat,
        steeper=steeper,
        still=still,
        late=_late(found, lag, int(state.step), noisy=noisy) if late else None,
    )


_OFF = (
    "between projections x went too far from its set for what was seen there to count on it",
    "take shorter steps on x, or upper_steps=1.",
)


def _judged(
    found: Convergence,
    solver: Alternating,
    bias: float,
    away: float,
    top: float,
    *,
    flat: bool,
    steeper: float,
    still: bool,
    late: tuple[str, str] | None,
) -> Convergence:
    """The statement that follows from the numbers, with the first reason that applies.

    - `bias`: the error of z, relative to z when |grad F| was largest.
    - `away`: how far x was off its set between projections, relative to its longest way.
    - `top`: the largest |grad F|^2, also of times when y did not yet follow x.
    - `flat`: whether the lower level has no curvature.
    - `steeper`: how many times larger its largest curvature is than at the start.
    - `still`: whether x never moved.
    - `late`: what to say where y and z may be behind x, and that cannot be seen.
    """
    value, error, start = found.stationarity, found.standard_error, found.start
    if value is None or error is None or start is None or found.moving is None:
        return found
    wanted = TOLERANCE**2 * start

    def says(converged: bool | None, reason: str, advice: str = "") -> Convergence:
        return dataclasses.replace(found, converged=converged, reason=reason, advice=advice)

    if flat:
        return says(
            False,
            "the lower level has no curvature: it has no single solution",
            "add a term such as 0.5 * mu * sum(y**2) to the lower objective.",
        )
    if not found.convex:
        return says(
            False,
            "the lower level was seen to bend down: it is not convex there",
            "add a term such as 0.5 * mu * sum(y**2) to the lower objective, or use damping=.",
        )
    if steeper > _STEEPER:
        return says(
            False,
            f"the curvature of the lower level has grown {steeper:.0e} times: y can hardly move",
            "x may be running away: add a term to the upper objective that holds it, or bound it "
            "by a smooth function, as in jnp.tanh(x).",
        )
    if value - 2 * error > TOLERANCE**2 * top and start > 0 and not still:
        share = min(math.sqrt(value / top), 1.0)
        return says(
            False,
            f"|grad F| is {share:.2g} of what it was at its largest",
            _onward(found),
        )
    if found.moving > _MOVING:
        return says(False, *_lagging(found))
    if bias > 2 * TOLERANCE:
        return says(False, *_inexact(found, solver))
    if away > 10 * TOLERANCE:
        return says(False, *_OFF)
    if found.moving > _SETTLED:
        return says(None, *_lagging(found))
    if bias > TOLERANCE / 2:
        return says(None, *_inexact(found, solver))
    if away > TOLERANCE:
        return says(None, *_OFF)
    if late is not None and value + 2 * error <= wanted:
        return says(None, *late)
    if value + 2 * error <= wanted or (still and error == 0):
        return says(True, f"|grad F| is at most {TOLERANCE:g} of what it was at its largest")
    if math.isinf(error):
        return says(None, f"{found.window} outer steps do not tell a gradient from its noise")
    if start <= 0:
        return says(
            None,
            "no gradient stood out from the noise, at the start or later",
            "larger batches would tell more.",
        )
    if value - 2 * error > wanted:
        return says(
            None,
            f"|grad F| is {min(math.sqrt(value / start), 1.0):.2g} of its largest since y follows "
            "x, and less of what it was before",
            _onward(found),
        )
    return says(
        None,
        f"the noise hides whether |grad F| is below {TOLERANCE:g} of what it was",
        "larger batches, shorter steps on x, or more of them would tell.",
    )


def _lag(solver: Alternating, state: State, pull: float) -> float:
    """The outer steps in which the slower of y and z follows x."""
    below, beside = solver.lower.draws, solver.adjoint.draws[0]
    steps = below / beside if below and beside else 1.0
    slower = min(1.0, steps * float(np.min(solver.lower.share(state.lower))))
    return 1 / max(pull * slower, 1e-9) if pull > 0 else 0.0


def _late(found: Convergence, lag: float, steps: int, *, noisy: bool) -> tuple[str, str]:
    hidden = (
        f"noise hides where they lag in the last {found.window:,}"
        if noisy
        else f"the run has made {steps:,}"
    )
    return (
        f"|grad F| looks small, but y and the adjoint need some {lag:,.0f} outer steps to follow "
        f"x, and {hidden}",
        f"make {(1.1e2 if noisy else 10) * lag:,.0f} outer steps, or more lower_steps and "
        "adjoint_steps in each; or rescale y, so that the lower level bends alike in all "
        "directions.",
    )


def _onward(found: Convergence) -> str:
    if found.trend is not None and found.trend > TOLERANCE / 10:
        return (
            f"make more outer steps: the last {found.window:,} still made "
            f"{100 * found.trend:.3g} % of the decrease."
        )
    return "x no longer descends: take shorter steps on x or larger batches, or a fading step size."


def _lagging(found: Convergence) -> tuple[str, str]:
    return (
        f"y has not settled: the last {found.window:,} outer steps still moved it by "
        f"{found.moving:.2g} of its whole way",
        "make more outer steps, more lower_steps in each, or longer ones (lower_lr).",
    )


def _inexact(found: Convergence, solver: Alternating) -> tuple[str, str]:
    off = found.adjoint or 0.0
    size = "more than its size" if off > 1 else f"{off:.2g} of its size"
    return f"the adjoint is off by {size}", solver.adjoint.remedy(off)
