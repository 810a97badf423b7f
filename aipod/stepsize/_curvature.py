"""The largest curvature of the lower level, followed through a run by a warm power iteration."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import draw
from aipod.sets import AbstractSet
from aipod.stepsize._stepsize import Curvature, StepSize

# Power iterations before the very first estimate, when there is no warm start yet.
_COLD_ITERATIONS = 30


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


def curvature_iterations(*rates: StepSize | None) -> int:
    """The power iterations that the most demanding of these step sizes asks for; 0 for none."""
    return max((r.iterations for r in rates if isinstance(r, Curvature)), default=0)


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
