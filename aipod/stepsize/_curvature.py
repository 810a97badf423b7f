"""`Curvature` steps, and the power iteration that follows the largest curvature through a run."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.problem import Bilevel, draw
from aipod.sets import AbstractSet
from aipod.stepsize._checks import check_positive, check_steps
from aipod.stepsize._power import power_iteration

# Power iterations before the very first estimate, when there is no warm start yet.
_COLD_ITERATIONS = 30


class Curvature(eqx.Module):
    """The step min(cap, safety / l_max), with l_max the largest curvature of the lower objective.

    l_max is the largest eigenvalue (in size) of grad_yy g on the current minibatch, found by
    `iterations` power iterations per outer step, each started from the vector of the step before.
    The Hessian is not projected, since the skipped steps of ProxSkip are not.

    In a federation every client iterates with its own Hessian, and the step follows the largest of
    their estimates. The maximum rides on an existing round, so each step uses the previous value;
    the first costs one exchange.

    **Arguments:**

    - `safety`: a factor on the step; below 1 is more careful.
    - `cap`: the longest step, for flat problems.
    - `iterations`: power iterations per outer step.
    - `tempered`: in `OneRound`, the lower level of E3-AiPOD, take shorter steps where the local
        ones undo each other, that is where they follow noise. Other slots ignore it.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=aipod.Curvature(safety=0.5))
        ```
    """

    safety: float = 1.0
    cap: float = 1.0
    iterations: int = eqx.field(static=True, default=4)
    tempered: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        for name in ("safety", "cap"):
            check_positive(getattr(self, name), f"Curvature: {name}")
        check_steps(self.iterations, "Curvature: iterations")

    def value(self, estimate: Array | None) -> Array:
        """The step for an estimate of l_max."""
        if estimate is None:
            raise ValueError(
                "a Curvature step size needs an estimate of the curvature, which is made for the "
                "fields `lr` of the lower and the adjoint slot alone: name the field so, or give a "
                "number."
            )
        tiny = jnp.finfo(estimate.dtype).tiny
        return jnp.minimum(self.cap, self.safety / jnp.maximum(estimate, tiny))

    def halved(self) -> str:
        """A more careful choice, as text."""
        return f"Curvature(safety={float(self.safety) / 2:.3g})"


class CurvatureState(eqx.Module):
    """The warm start of the power iteration, and its last estimate."""

    vector: PyTree
    estimate: Array


def curvature_iterations(*lrs: Any) -> int:
    """The power iterations that the most demanding of these step sizes asks for; 0 for none."""
    return max((lr.iterations for lr in lrs if isinstance(lr, Curvature)), default=0)


def curvature_init(y: PyTree, lower_set: AbstractSet) -> CurvatureState:
    """A fixed pseudo-random start (`init` has no key)."""
    noise = jax.random.normal
    key = jax.random.key(0)
    if lower_set.per_client:
        # The same for every client, so that it does not depend on their number.
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

    Returns the new state, and the estimate that this outer step may use.
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
