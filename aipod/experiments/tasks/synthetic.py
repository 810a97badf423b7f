"""The paper's synthetic problem, for which everything is known in closed form.

    min over B x = 0 of   F(x) = sin(c'x + d'y*(x)) + ln(||x + y*(x)||^2 + 1)
    y*(x) = argmin of 1/2 ||x - y||^2  over  A y + H x = 0

Section 6 of the paper, Figure 1 (`fig:name1`). y*(x) = (P_y - A^+ H) x is the projection of x on
the lower set, and grad_yy g = I. Gradients carry Gaussian noise.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod._misc.tree import to_device
from aipod.experiments.base import Columns, Experiment, Metric, Panel, Task, option, varied
from aipod.experiments.limits import NOT_NEGATIVE, Limit, at_least, check_limits
from aipod.problem import Bilevel, Noise
from aipod.sets import AbstractSet, Affine, Free

_DEVIATION = Limit("be 0 or more, a standard deviation", NOT_NEGATIVE.holds)


@dataclasses.dataclass(frozen=True)
class Options:
    dimension: int = option(100, "size of x and of y", at_least(2))
    lower_rank: int = option(20, "rank of A, the constraints on y")
    upper_rank: int = option(20, "rank of B, the constraints on x")
    noise: float = option(0.1, "standard deviation of the noise on every gradient", _DEVIATION)
    coupled: bool = option(True, "whether the constraint on y moves with x; off sets H = 0")
    constraints: Literal["both", "upper", "lower", "none"] = option(
        "both", "which levels are constrained: both, upper, lower or none"
    )
    problem_seed: int = option(0, "seed of the matrices and of the starting point", at_least(0))

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("lower_rank", "upper_rank"):
            if not 1 <= getattr(self, name) < self.dimension:
                raise ValueError(
                    f"{name} must be from 1 to {self.dimension - 1}, below the dimension, got "
                    f"{getattr(self, name)}."
                )


class Matrices(NamedTuple):
    """The matrices of A y + H x = 0 and B x = 0, and the directions c and d."""

    A: np.ndarray
    H: np.ndarray
    B: np.ndarray
    c: np.ndarray
    d: np.ndarray


def orthonormal_rows(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(columns, rows)))[0].T


def matrices(options: Options) -> Matrices:
    """Draws the matrices. A and B repeat some rows, so that they do not have full row rank.

    H repeats the same rows as A, so that the lower set is never empty.
    """
    rng = np.random.default_rng(options.problem_seed)
    n, scale = options.dimension, np.sqrt(options.dimension)

    def with_repeats(matrix: np.ndarray) -> np.ndarray:
        return np.concatenate([matrix, matrix[: (len(matrix) + 3) // 4]])

    return Matrices(
        A=with_repeats(orthonormal_rows(rng, options.lower_rank, n)),
        H=with_repeats(rng.normal(size=(options.lower_rank, n)) / scale) * options.coupled,
        B=with_repeats(orthonormal_rows(rng, options.upper_rank, n)),
        c=rng.normal(size=n) / scale,
        d=rng.normal(size=n) / scale,
    )


def build(options: Options) -> Task:
    data = matrices(options)
    c, d = to_device(data.c), to_device(data.d)
    lower_set: AbstractSet = Free()
    if options.constraints in ("both", "lower"):
        lower_set = Affine(data.A, 0.0, coupling=data.H if options.coupled else None)
    upper_set = Affine(data.B) if options.constraints in ("both", "upper") else Free()

    def objective(x: Array, y: Array) -> Array:
        return jnp.sin(c @ x + d @ y) + jnp.log(jnp.sum((x + y) ** 2) + 1)

    def lower_solution(x: Array) -> Array:
        return lower_set.project(x, x)

    def record(x: Array, y: Array) -> dict[str, Array]:
        # The paper pairs y^{k+1} with x^k; here both are the newest iterates.
        best = lower_solution(x)
        value, slope = jax.value_and_grad(lambda x: objective(x, lower_solution(x)))(x)
        stationarity = jnp.sum(upper_set.tangent(slope) ** 2)
        lower_gap = jnp.sum((y - best) ** 2)
        return {
            "error": stationarity + lower_gap,
            "stationarity": stationarity,
            "lower_gap": lower_gap,
            "objective": value,
        }

    problem = Bilevel(
        upper=lambda x, y, noise: objective(x, y) + noise(x, y),
        lower=lambda x, y, noise: 0.5 * jnp.sum((x - y) ** 2) + noise(x, y),
        upper_set=upper_set,
        lower_set=lower_set,
        upper_samples=Noise(options.noise),
        lower_samples=Noise(options.noise),
    )
    if options.noise == 0:
        problem = problem.expected()  # for methods that accept no noise
    rng = np.random.default_rng([options.problem_seed, 1])
    x0, y0 = rng.normal(size=(2, options.dimension)) / np.sqrt(options.dimension)
    rows = data.B[: options.upper_rank]  # orthonormal rows, to project x0 onto the upper set
    x0 = x0 - rows.T @ (rows @ x0)
    return Task(problem, to_device(x0), to_device(y0), record, running_error)


def running_error(columns: Columns) -> dict[str, np.ndarray]:
    """The paper's running average of the error, over the steps that were recorded."""
    error = columns["error"].astype(float)
    return {"running_error": np.cumsum(error) / np.arange(1, len(error) + 1)}


def panels(options: Options) -> tuple[Panel, ...]:
    """Figure 1. Its left half has T = 2 in the paper and T = 1 here, where p = 1 is AiPOD."""
    against = ["aipod", "e-aipod:upper_steps=1", "e-aipod:upper_steps=2"]
    if not options.coupled or options.constraints in ("upper", "none"):
        against.append("e2-aipod")
    return (
        Panel("How often y is projected", varied("e-aipod:lower_prob", (1, 0.5, 0.3, 0.1))),
        Panel("AiPOD and its efficient variants", tuple(against)),
    )


# The paper's step sizes. grad_yy g = I, so that one Neumann term with step 1 is exact.
_SHARED: dict[str, Any] = {"upper_lr": 0.02, "lower_lr": 0.01, "lower_steps": 5}
_NEUMANN: dict[str, Any] = _SHARED | {"adjoint_lr": 1.0, "adjoint_steps": 1}

EXPERIMENT = Experiment(
    name="synthetic",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("running_error", "running average of the error"),
        Metric("error", "error: stationarity + lower gap"),
        Metric("stationarity", "stationarity ‖∇F(x)‖² on the upper set"),
        Metric("lower_gap", "lower gap ‖y − y*(x)‖²"),
        Metric("objective", "objective F(x)", log=False),
    ),
    axes=("lower_projections", "step"),
    arguments={
        "e-aipod": _NEUMANN | {"lower_prob": 0.3, "upper_steps": 1},
        "aipod": _NEUMANN,
        # Its adjoint is a noisy ProxSkip, which would not damp the noise with step 1.
        "e2-aipod": _SHARED
        | {"lower_prob": 0.3, "adjoint_prob": 0.3, "adjoint_lr": 0.2, "adjoint_steps": 10},
        # These do not accept all constraints (see the option), and the last two no noise.
        "alset": _NEUMANN,
        "bsa": {"upper_lr": 0.02, "lower_lr": 0.5, "decay": 0.25, "adjoint_lr": 1.0}
        | {"adjoint_steps": 1},
        "stocbio": _NEUMANN,
        "ttsa": {"upper_lr": 0.02, "lower_lr": 0.05, "adjoint_lr": 1.0, "adjoint_steps": 1},
        "soba": {"upper_lr": 0.02, "lower_lr": 0.05, "adjoint_lr": 0.05},
        "ig-al": {"upper_lr": 0.02, "tolerance": 1e-4},
        "first-order-penalty": {"upper_lr": 0.02, "perturbation": 0.05, "tolerance": 1e-4},
    },
    steps=2000,
)
