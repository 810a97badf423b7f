"""Step sizes: a number, an Optax schedule of the outer step, or the lower level's curvature."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.problem import Bilevel
from aipod.sampling import draw
from aipod.sets import AbstractSet

# Power iterations before the very first estimate, when there is no warm start yet.
_COLD_ITERATIONS = 30


class Curvature(eqx.Module):
    """The step min(cap, safety / l_max), with l_max the largest curvature of the lower objective.

    l_max is the largest eigenvalue (in size) of grad_yy g on the current minibatch, found by
    `iterations` power iterations per outer step, each started from the vector of the step before.
    The Hessian is not projected, since the skipped steps of ProxSkip are not.

    In a federation every client iterates with its own Hessian and the step follows the largest of
    them. That maximum, one number, comes with a round that is sent anyway, and so is the one of
    the outer step before; only the very first is found before the first step.

    **Arguments:**

    - `safety`: a factor on the step; below 1 is more careful.
    - `cap`: the longest step, for flat problems.
    - `iterations`: power iterations per outer step.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=aipod.Curvature(safety=0.5))
        ```
    """

    safety: float = 1.0
    cap: float = 1.0
    iterations: int = eqx.field(static=True, default=4)

    def __check_init__(self) -> None:
        for name in ("safety", "cap"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"Curvature: {name} must be positive, got {value}.")
        if self.iterations < 1:
            raise ValueError(f"Curvature: iterations must be at least 1, got {self.iterations}.")


StepSize = float | Array | Callable[[Array], Array] | Curvature


def check_rate(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a step size."""
    if isinstance(value, Curvature) or callable(value) or isinstance(value, jax.core.Tracer):
        return
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be a number, an Optax schedule or aipod.Curvature(), got "
            f"{type(value).__name__}."
        )
    if not 0 < float(array) < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {float(array)}: try 0.01.")


def check_steps(value: Any, name: str) -> None:
    """Raises `ValueError` unless value is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}.")


class Rates(eqx.Module):
    """What step sizes may depend on at one outer step; called on one, it gives the number.

    None stands for 1.
    """

    step: Array
    curvature: Array | None

    def __call__(self, rate: StepSize | None) -> Array:
        if isinstance(rate, Curvature):
            if self.curvature is None:
                raise ValueError("a Curvature step size needs an estimate of the curvature.")
            tiny = jnp.finfo(self.curvature.dtype).tiny
            return jnp.minimum(rate.cap, rate.safety / jnp.maximum(self.curvature, tiny))
        if rate is None:
            return jnp.ones(())
        return jnp.asarray(rate(self.step) if callable(rate) else rate, float)


def power_iteration(
    matvec: Callable[[PyTree], PyTree],
    start: PyTree,
    iterations: int | Array,
    *,
    per_client: bool = False,
) -> tuple[Array, PyTree]:
    """The size of a map's largest eigenvalue, and its vector; symmetric in some inner product.

    With `per_client` the map acts on each entry of the leading axis alone, and so is iterated.
    """
    dtype = jnp.result_type(*jax.tree.leaves(start))
    tiny = jnp.finfo(dtype).tiny

    def norm(tree: PyTree) -> Array:
        return jax.vmap(optax.tree.norm)(tree) if per_client else optax.tree.norm(tree)

    def unit(tree: PyTree, size: Array, fallback: PyTree) -> PyTree:
        def scaled(leaf: Array, other: Array) -> Array:
            beside = size.reshape(size.shape + (1,) * (leaf.ndim - size.ndim)).astype(leaf.dtype)
            return jnp.where(beside > 0, leaf / jnp.maximum(beside, tiny), other)

        return jax.tree.map(scaled, tree, fallback)

    def body(_: Any, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        _, vector = carry
        image = matvec(vector)
        size = norm(image)
        # A zero image (a flat objective) keeps the vector, so that a later step can start from it.
        return size, unit(image, size, vector)

    sizes = norm(start)
    begin = (jnp.zeros_like(sizes, dtype), unit(start, sizes, start))
    return jax.lax.fori_loop(0, iterations, body, begin)


def hessian_product(
    objective: Callable[[PyTree], Array], y: PyTree, v: PyTree, damping: float = 0.0
) -> PyTree:
    """(grad_yy objective(y) + damping I) v, without forming a Hessian."""
    product = jax.jvp(jax.grad(objective), (y,), (v,))[1]
    return optax.tree.add_scale(product, damping, v) if damping else product


class CurvatureState(eqx.Module):
    """The warm start of the power iteration, and its last estimate."""

    vector: PyTree
    estimate: Array


def curvature_init(y: PyTree, lower_set: AbstractSet) -> CurvatureState:
    """A start without structure, the same in every run: init has no key to spend."""
    noise = jax.random.normal
    key = jax.random.key(0)
    if lower_set.per_client:
        # The same for every client, none of which then depends on how many there are.
        one = jax.tree.map(lambda leaf: leaf[0], y)
        drawn = optax.tree.random_like(key, one, noise)
        vector = jax.tree.map(lambda leaf, v: jnp.broadcast_to(v, leaf.shape), y, drawn)
    else:
        vector = optax.tree.random_like(key, y, noise)
    return CurvatureState(vector, jnp.zeros((), jnp.result_type(*jax.tree.leaves(y))))


def curvature_update(
    problem: Bilevel,
    x: PyTree,
    y: PyTree,
    state: CurvatureState,
    step: Array,
    iterations: int,
    *,
    key: PRNGKeyArray,
) -> tuple[CurvatureState, Array]:
    """Warm-started power iterations on grad_yy g at (x, y) and one batch.

    The new state, and the estimate that this outer step may use.
    """
    objective, samples = problem.lower_at(x, draws=1)
    batch = draw(samples, key)
    # Linear in v: linearised once for all iterations.
    product = jax.linearize(jax.grad(lambda t: objective(t, batch)), y)[1]

    def matvec(v: PyTree) -> PyTree:
        # In the inner product of the set: that is the Hessian the steps along riesz(g) meet.
        return problem.lower_set.riesz(product(v))

    per_client = problem.lower_set.per_client
    count = jnp.where(step == 0, _COLD_ITERATIONS + iterations, iterations)
    estimates, vector = power_iteration(matvec, state.vector, count, per_client=per_client)
    new = CurvatureState(vector, problem.lower_set.largest(estimates))
    if not per_client:
        return new, new.estimate
    return new, jnp.where(step == 0, new.estimate, state.estimate)


def curvature_iterations(*rates: StepSize | None) -> int:
    """The power iterations that the most demanding of these step sizes asks for; 0 for none."""
    return max((r.iterations for r in rates if isinstance(r, Curvature)), default=0)


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
    """The paper's choices for a run of K outer steps, as arguments of the solver it is about.

    The theorems fix how each argument scales with K and leave the constants open; the constants
    are arguments here. `rule` is the LaTeX label of the statement:

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
    if rule not in ("thm", "redu-LL", "redu-UL", "cor-E2"):
        raise ValueError(
            f'rule must be "thm", "redu-LL", "redu-UL" or "cor-E2", the paper\'s labels, got '
            f"{rule!r}."
        )
    root = math.sqrt(steps)
    if rule == "cor-E2":
        count = upper_steps or max(1, round(steps**0.25))
        alpha = min(longest, upper / root)
        chance = min(1.0, probability / steps**0.25)
        return {
            "upper_lr": alpha,
            "lower_lr": min(longest, ratio * alpha),
            "adjoint_lr": min(longest, adjoint / root),
            "lower_prob": chance,
            "adjoint_prob": chance,
            "upper_steps": count,
            "adjoint_steps": max(1, math.ceil(terms * math.log(steps))),
        }
    count = upper_steps or 1
    alpha = min(longest, upper / (count * root))
    beta = min(longest, ratio * alpha * count)
    series = {"adjoint_steps": max(1, math.ceil(terms * math.log(max(1 / alpha, steps))))}
    if rule == "thm":
        if count != 1:
            raise ValueError('upper_steps belongs to E-AiPOD: use the rule "redu-LL" or "redu-UL".')
        return {"upper_lr": alpha, "lower_lr": beta} | series
    return {
        "upper_lr": alpha,
        "lower_lr": beta,
        "lower_prob": min(1.0, probability * math.sqrt(beta)),
        "upper_steps": count,
        "extrapolation": math.sqrt(count) if rule == "redu-UL" else 1.0,
    } | series
