"""The step sizes, numbers of steps and batches that the papers of the baselines ask for."""

import math
from typing import Any

from aipod.stepsize._stepsize import check_steps


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
    """A paper's choices for a run of K outer steps, as arguments of its method.

    The papers fix how each argument scales with K; the constants are arguments here. Those of
    AiPOD and its variants are in `aipod.stepsize.theory`.

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
    series = {"adjoint_steps": max(1, math.ceil(terms * math.log(steps)))}

    def shrunk(constant: float, power: float) -> float:
        return min(longest, constant * steps**-power)

    first = min(lower, longest)
    rules: dict[str, dict[str, Any]] = {
        "alset": {"upper_lr": shrunk(upper, 0.5), "lower_lr": shrunk(lower, 0.5)} | series,
        "bsa": {
            "upper_lr": shrunk(upper, 0.5),
            "lower_lr": first,
            "growth": 1.0,
            "decay": first * convexity / 2,
        }
        | series,
        "stocbio": {"upper_lr": min(longest, upper), "lower_lr": first, "batch": steps} | series,
        "ttsa": {"upper_lr": shrunk(upper, 0.6), "lower_lr": shrunk(lower, 0.4)} | series,
        "soba": {
            "upper_lr": shrunk(upper, 0.5),
            "lower_lr": shrunk(lower, 0.5),
            "adjoint_lr": shrunk(adjoint, 0.5),
        },
        "ig-al": {"upper_lr": min(longest, upper), "tolerance": 1 / steps},
        "first-order-penalty": {
            "upper_lr": min(longest, upper),
            "perturbation": steps**-0.5,
            "tolerance": 1 / steps,
        },
    }
    if method not in rules:
        raise ValueError(f"method must be one of {', '.join(rules)}, got {method!r}.")
    return rules[method]
