"""The step sizes, numbers of steps and batches that papers ask for, as functions of K.

One table: the statements of the AiPOD paper by their LaTeX labels (`theory`), and the other methods
by their names in the command (`rule`). Papers fix how each argument scales with the number K of
outer steps and leave the constants open; the constants are arguments here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from aipod.stepsize._checks import check_steps

Arguments = dict[str, Any]


class _Constants(NamedTuple):
    """K, and what the papers leave open."""

    steps: int
    upper: float = 1.0
    lower: float = 1.0
    adjoint: float = 1.0
    terms: float = 1.0
    probability: float = 1.0
    convexity: float = 1.0
    longest: float = 1.0
    upper_steps: int | None = None

    def capped(self, value: float) -> float:
        return min(self.longest, value)

    def shrunk(self, constant: float, power: float) -> float:
        """constant K^(-power), or the longest step."""
        return self.capped(constant * self.steps**-power)

    def series(self, of: float | None = None) -> Arguments:
        """N = terms log(of); of K by default."""
        return {"adjoint_steps": max(1, math.ceil(self.terms * math.log(of or self.steps)))}


def _aipod(c: _Constants) -> Arguments:
    if (c.upper_steps or 1) != 1:
        raise ValueError('upper_steps belongs to E-AiPOD: use the rule "redu-LL" or "redu-UL".')
    alpha = c.capped(c.upper / math.sqrt(c.steps))
    series = c.series(max(1 / alpha, c.steps))
    return {"upper_lr": alpha, "lower_lr": c.capped(c.lower * alpha)} | series


def _e_aipod(delta: Callable[[int], float]) -> Callable[[_Constants], Arguments]:
    def arguments(c: _Constants) -> Arguments:
        count = c.upper_steps or 1
        alpha = c.capped(c.upper / (count * math.sqrt(c.steps)))
        beta = c.capped(c.lower * alpha * count)
        return {
            "upper_lr": alpha,
            "lower_lr": beta,
            "lower_prob": min(1.0, c.probability * math.sqrt(beta)),
            "upper_steps": count,
            "extrapolation": delta(count),
        } | c.series(max(1 / alpha, c.steps))

    return arguments


def _e2_aipod(c: _Constants) -> Arguments:
    alpha = c.capped(c.upper / math.sqrt(c.steps))
    chance = min(1.0, c.probability / c.steps**0.25)
    return {
        "upper_lr": alpha,
        "lower_lr": c.capped(c.lower * alpha),
        "adjoint_lr": c.capped(c.adjoint / math.sqrt(c.steps)),
        "lower_prob": chance,
        "adjoint_prob": chance,
        "upper_steps": c.upper_steps or max(1, round(c.steps**0.25)),
    } | c.series()


def _bsa(c: _Constants) -> Arguments:
    first = c.capped(c.lower)
    decay = first * c.convexity / 2
    steps = {"upper_lr": c.shrunk(c.upper, 0.5), "lower_lr": first}
    return steps | {"growth": 1.0, "decay": decay} | c.series()


_THEORY: dict[str, Callable[[_Constants], Arguments]] = {
    "thm": _aipod,
    "redu-LL": _e_aipod(lambda count: 1.0),
    "redu-UL": _e_aipod(math.sqrt),
    "cor-E2": _e2_aipod,
}

_RULES: dict[str, Callable[[_Constants], Arguments]] = {
    "alset": lambda c: (
        {"upper_lr": c.shrunk(c.upper, 0.5), "lower_lr": c.shrunk(c.lower, 0.5)} | c.series()
    ),
    "bsa": _bsa,
    "stocbio": lambda c: (
        {"upper_lr": c.capped(c.upper), "lower_lr": c.capped(c.lower), "batch": c.steps}
        | c.series()
    ),
    "ttsa": lambda c: (
        {"upper_lr": c.shrunk(c.upper, 0.6), "lower_lr": c.shrunk(c.lower, 0.4)} | c.series()
    ),
    "soba": lambda c: {
        "upper_lr": c.shrunk(c.upper, 0.5),
        "lower_lr": c.shrunk(c.lower, 0.5),
        "adjoint_lr": c.shrunk(c.adjoint, 0.5),
    },
    "ig-al": lambda c: {"upper_lr": c.capped(c.upper), "tolerance": 1 / c.steps},
    "first-order-penalty": lambda c: {
        "upper_lr": c.capped(c.upper),
        "perturbation": c.steps**-0.5,
        "tolerance": 1 / c.steps,
    },
}


def theory(
    steps: int,
    rule: str,
    *,
    upper: float = 1.0,
    ratio: float = 1.0,
    probability: float = 1.0,
    adjoint: float = 1.0,
    upper_steps: int | None = None,
    terms: float = 1.0,
    longest: float = 1.0,
) -> dict[str, Any]:
    """The AiPOD paper's choices for a run of K outer steps, as arguments of the solver.

    `rule` is the LaTeX label of the statement:

    - `"thm"` (AiPOD): alpha = upper / sqrt(K), beta = ratio alpha, N = terms log K.
    - `"redu-LL"` (E-AiPOD): alpha = upper / (T sqrt(K)), delta = 1, beta = ratio alpha T,
        p = probability sqrt(beta), N = terms log(1 / alpha).
    - `"redu-UL"` (E-AiPOD): the same with delta = sqrt(T). It asks for lower batches T times as
        large, which is for the caller to give.
    - `"cor-E2"` (E2-AiPOD): alpha = upper / sqrt(K), beta = ratio alpha, rho = adjoint / sqrt(K),
        p = q = probability K^(-1/4), T = K^(1/4), N = terms log K. With rho this small N steps
        from zero leave most of the adjoint unsolved; the paper's own proof takes N = O(1 / alpha).

    **Arguments:**

    - `steps` [K]: outer steps.
    - `rule`: which statement.
    - `upper` [alpha bar], `ratio` [beta / (alpha T)], `probability`, `adjoint`, `terms`: constants.
    - `upper_steps` [T]: default 1, and for `"cor-E2"` K^(1/4).
    - `longest`: no step is longer; 1 / l_g1 for beta and rho.

    !!! example
        ```python
        solver = aipod.EAiPOD(**aipod.stepsize.theory(10_000, "redu-LL", upper_steps=2))
        ```
    """
    check_steps(steps, "steps (K)")
    if rule not in _THEORY:
        raise ValueError(
            f'rule must be "thm", "redu-LL", "redu-UL" or "cor-E2", the paper\'s labels, got '
            f"{rule!r}."
        )
    return _THEORY[rule](
        _Constants(
            steps,
            upper,
            ratio,
            adjoint,
            terms,
            probability,
            longest=longest,
            upper_steps=upper_steps,
        )
    )


def rule(
    method: str,
    steps: int,
    *,
    upper: float = 1.0,
    lower: float = 1.0,
    adjoint: float = 1.0,
    terms: float = 1.0,
    convexity: float = 1.0,
    longest: float = 1.0,
) -> dict[str, Any]:
    """Another paper's choices for a run of K outer steps, as arguments of its method.

    Those of AiPOD and its variants are in `aipod.stepsize.theory`.

    - `"alset"`: alpha = upper / sqrt(K), beta = lower / sqrt(K), N = terms log K.
    - `"bsa"`: alpha = upper / sqrt(K), t_k = ceil(sqrt(k + 1)), beta_t from min(lower, longest) as
        2 / (convexity t), N = terms log K.
    - `"stocbio"`: alpha = upper, beta = lower, batches of K, N = terms log K.
    - `"ttsa"`: alpha = upper K^(-3/5), beta = lower K^(-2/5), N = terms log K.
    - `"soba"`: alpha, beta, rho = upper, lower, adjoint, each over sqrt(K).
    - `"ig-al"`: alpha = upper, tolerance 1 / K.
    - `"first-order-penalty"`: alpha = upper, delta = 1 / sqrt(K), tolerance 1 / K.

    **Arguments:**

    - `method`: which one, by its name in the command.
    - `steps` [K]: outer steps.
    - `upper`, `lower`, `adjoint`, `terms`: constants.
    - `convexity` [mu_g]: of the lower objective, for BSA's shrinking steps.
    - `longest`: no step is longer; 1 / l_g1 for beta and rho.

    !!! example
        ```python
        solver = aipod.TTSA(**aipod.baselines.rule("ttsa", 10_000, upper=0.5))
        ```
    """
    check_steps(steps, "steps (K)")
    if method not in _RULES:
        raise ValueError(f"method must be one of {', '.join(_RULES)}, got {method!r}.")
    constants = _Constants(
        steps, upper, lower, adjoint, terms, convexity=convexity, longest=longest
    )
    return _RULES[method](constants)
