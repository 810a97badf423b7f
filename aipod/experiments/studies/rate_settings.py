"""The problems on which the paper's rates are measured, and solvers with the theorems' steps."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

import aipod
from aipod.algorithms import Alternating
from aipod.experiments.studies.horizon import Setting
from aipod.experiments.tasks import synthetic
from aipod.problem import Bilevel, expected, grad_x_upper, implicit_term
from aipod.slots import Turn
from aipod.stepsize import Rates, theory

_SIZE, _RANK, _NOISE = 20, 5, 0.1


@dataclasses.dataclass(frozen=True)
class Method:
    """A solver for each K, and the claimed exponents of samples, lower and upper projections.

    `longest`: the largest K that is run, if larger ones would take too long.
    `batches`: the size of upper batches in a run of K steps; None for 1.
    `falls`: the error of a run of K steps is claimed to be O(K^(-falls)).
    """

    name: str
    label: str
    make: Callable[[int], Alternating]
    claimed: tuple[float, float, float]
    longest: int | None = None
    batches: Callable[[int], int] | None = None
    falls: float = 0.5


def arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Converts floats to arrays, so that all values share one compiled program."""
    return {k: jnp.asarray(v) if isinstance(v, float) else v for k, v in arguments.items()}


class _Counted(eqx.Module):
    """Draws nothing but counts as `size` samples; for noise that represents their mean."""

    size: int = eqx.field(static=True)

    def __call__(self, key: PRNGKeyArray) -> None:
        return None

    def expected(self) -> None:
        return None


def noisy(batch: int = 1, *, averaged: bool = False, upper_batch: int = 1) -> Setting:
    """The synthetic problem without coupling.

    - `batch`: the size of lower batches.
    - `averaged`: whether the noise of grad_y f, which enters through w, is averaged too.
    - `upper_batch`: the size of upper batches.
    """
    options = synthetic.Options(
        dimension=_SIZE, lower_rank=_RANK, upper_rank=_RANK, noise=_NOISE, coupled=False
    )
    task = synthetic.build(options)
    problem, record = task.problem, task.record
    share = 1 / math.sqrt(batch) if averaged else 1.0

    def upper(x: Array, y: Array, noise: Any) -> Array:
        plain = problem.upper(x, y, lambda x, y: 0.0)
        return plain + noise(x, share * y)

    def error(x: Array, y: Array) -> Array:
        # E2-AiPOD's theorem is about the projected x; in the other methods x lies in the set.
        return record(problem.upper_set.project(x), y)["stationarity"]

    lower_samples = aipod.Noise(_NOISE / math.sqrt(batch), _Counted(batch))
    upper_samples = problem.upper_samples
    if upper_batch > 1:
        upper_samples = aipod.Noise(_NOISE / math.sqrt(upper_batch), _Counted(upper_batch))
    made = aipod.Bilevel(
        upper,
        problem.lower,
        problem.upper_set,
        problem.lower_set,
        upper_samples,
        lower_samples,
    )
    return Setting(made, task.x0, task.y0, error)


def logistic() -> Setting:
    """Ridge penalties x, one for each feature, of a classifier y whose weights sum to zero.

    f is the loss on held-out examples and a small penalty on x, whose entries sum to zero; g the
    loss on training examples and the ridge penalty, 1/2 sum_i exp(x_i) y_i^2.
    """
    features, examples, batch = 6, 100, 2
    rng = np.random.default_rng(0)
    truth = rng.normal(size=features)

    def data() -> tuple[Array, Array]:
        inputs = rng.normal(size=(examples, features))
        labels = np.sign(inputs @ truth + rng.normal(size=examples))
        return jnp.asarray(inputs, float), jnp.asarray(labels, float)

    def loss(y: Array, part: tuple[Array, Array]) -> Array:
        return jnp.mean(jax.nn.softplus(-part[1] * (part[0] @ y)))

    problem = aipod.Bilevel(
        upper=lambda x, y, part: 5 * loss(y, part) + 0.1 * jnp.sum(x**2),
        lower=lambda x, y, part: loss(y, part) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        upper_set=aipod.Affine(np.ones((1, features))),
        lower_set=aipod.Affine(np.ones((1, features))),
        upper_samples=aipod.Minibatches(data(), batch),
        lower_samples=aipod.Minibatches(data(), batch),
    )
    x0 = problem.upper_set.project(jnp.asarray(2 * rng.normal(size=features), float))

    # With f = g the adjoint is a Newton step; five of them from the run's own y are enough.
    newton = Bilevel(problem.lower, problem.lower, lower_set=problem.lower_set)
    batches = expected(problem.upper_samples), expected(problem.lower_samples)
    twice = batches[1], batches[1]

    def error(x: Array, y: Array) -> Array:
        x, y = problem.upper_set.project(x), problem.lower_set.project(y)
        y = jax.lax.fori_loop(0, 5, lambda _, y: y - _dense(newton, x, y, *twice), y)
        z = _dense(problem, x, y, *batches)
        slope = grad_x_upper(problem, x, y, batches[0])
        slope = slope + implicit_term(problem, x, y, z, *batches)
        return jnp.sum(problem.upper_set.tangent(slope) ** 2)

    return Setting(problem, x0, jnp.zeros(features), error)


def _dense(problem: Bilevel, x: Array, y: Array, upper_batch: Any, lower_batch: Any) -> Array:
    """Computes (P G P)^+ grad_y f by a dense solve with the given batches."""
    fixed = Bilevel(
        problem.upper,
        problem.lower,
        lower_set=problem.lower_set,
        lower_samples=lambda _: lower_batch,
    )
    turn = Turn(fixed, x, y, Rates(jnp.zeros(()), None), jax.random.key(0))
    return aipod.Direct().solve(turn, upper_batch, None)[0]


def several_steps(steps: int, count: int) -> Alternating:
    """E-AiPOD with T steps on x for each projection, `redu-UL`."""
    chosen = theory(steps, "redu-UL", upper=1.0, ratio=4.0, upper_steps=count)
    chosen |= {"adjoint_lr": 1.0, "adjoint_steps": 1}
    return aipod.EAiPOD(**arrays(chosen), lower_steps=1)


def methods(constants: dict[str, Any], eta: float, exact: bool) -> tuple[Method, ...]:
    """The paper's three methods with the theorems' choices, and variants of E2-AiPOD's corollary.

    - `eta`: the Neumann step; `exact`: whether one Neumann term with this step is exact.
    """

    def series(arguments: dict[str, Any]) -> dict[str, Any]:
        terms = {"adjoint_steps": 1} if exact else {}
        return arrays(arguments | {"adjoint_lr": eta} | terms)

    def first(steps: int) -> Alternating:
        return aipod.AiPOD(**series(theory(steps, "thm", **constants)), lower_steps=1)

    def second(steps: int) -> Alternating:
        return aipod.EAiPOD(**series(theory(steps, "redu-LL", **constants)), lower_steps=1)

    def constant_rho(steps: int) -> Alternating:
        chosen = theory(steps, "cor-E2", **constants)
        chosen |= {"adjoint_lr": eta / 2, "adjoint_prob": 0.5}
        return aipod.E2AiPOD(**arrays(chosen), lower_steps=1)

    def warm(steps: int) -> Alternating:
        chosen = arrays(theory(steps, "cor-E2", **constants, adjoint=constants["ratio"]))
        return Alternating(
            lower=aipod.ProxSkip(lr=chosen["lower_lr"], steps=1, prob=chosen["lower_prob"]),
            adjoint=aipod.ProxSkipAdjoint(
                steps=1, lr=chosen["adjoint_lr"], prob=chosen["adjoint_prob"], warm=True
            ),
            upper=aipod.Periodic(steps=chosen["upper_steps"], lr=chosen["upper_lr"]),
        )

    def printed(steps: int) -> Alternating:
        chosen = theory(steps, "cor-E2", **constants, adjoint=constants["ratio"])
        return aipod.E2AiPOD(**arrays(chosen), lower_steps=1)

    def proof(steps: int) -> Alternating:
        chosen = theory(steps, "cor-E2", **constants, adjoint=constants["ratio"])
        # (1 - rho mu / 2)^N = O(alpha^2), as the proof asks for.
        chosen["adjoint_steps"] = math.ceil(math.log(steps) / chosen["adjoint_lr"])
        return aipod.E2AiPOD(**arrays(chosen), lower_steps=1)

    def one_round(steps: int) -> Alternating:
        chosen = theory(steps, "cor-E2", **constants, adjoint=constants["ratio"])
        return _e3(chosen["upper_lr"], chosen["lower_lr"], chosen["adjoint_lr"], 4, 2)

    def growing(steps: int) -> Alternating:
        # alpha = sqrt(T / K) for batches of T, and as many local steps, of the same length in all.
        count = third_root(steps)
        alpha = constants["upper"] * math.sqrt(count / steps)
        length = constants["ratio"] * alpha
        return _e3(alpha, min(length, 1.0), min(length, 1.0), count, 2)

    claims = (2.0, 1.5, 1.5)
    return (
        Method("aipod", "AiPOD", first, (2.0, 2.0, 2.0)),
        Method("e-aipod", "E-AiPOD", second, (2.0, 1.5, 2.0)),
        Method("e2-constant", "E2-AiPOD, ρ constant", constant_rho, claims),
        Method("e2-warm", "E2-AiPOD, warm adjoint", warm, claims),
        Method("e2-printed", "E2-AiPOD, as printed", printed, claims),
        Method("e2-proof", "E2-AiPOD, N of the proof", proof, claims, longest=3000),
        Method("e3", "E3-AiPOD", one_round, (2.0, 2.0, 2.0)),
        Method(
            "e3-growing", "E3-AiPOD, S = T = K^(1/3)", growing, claims, 30_000, third_root, 2 / 3
        ),
    )


def third_root(steps: int) -> int:
    """K^(1/3), rounded: the local steps and the upper batch of E3-AiPOD in a run of K steps."""
    return max(1, round(steps ** (1 / 3)))


def _e3(
    upper_lr: float,
    lower_length: float,
    adjoint_length: float,
    lower_steps: int,
    adjoint_steps: int,
) -> Alternating:
    """E3-AiPOD with plain steps on x; the lengths are those of all local steps together."""
    rates = arrays(
        {
            "upper_lr": upper_lr,
            "lower_lr": lower_length / lower_steps,
            "adjoint_lr": adjoint_length / adjoint_steps,
        }
    )
    return aipod.E3AiPOD(**rates, lower_steps=lower_steps, adjoint_steps=adjoint_steps, damping=0.0)
