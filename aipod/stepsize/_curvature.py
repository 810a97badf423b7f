"""`Curvature` steps, and the power iteration that follows the largest curvature through a run."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import signs, subkey, subkeys
from aipod._misc.loops import is_large
from aipod.problem import Bilevel, draw, is_random
from aipod.sets import AbstractSet
from aipod.stepsize._ahead import ahead
from aipod.stepsize._checks import check_positive, check_steps
from aipod.stepsize._pauses import AT_ONCE, after_a_pause, first_of_a_pause, is_due
from aipod.stepsize._power import beside, norm, power_iteration, unit

# About so many power iterations more for the very first estimate, which has no warm start.
_COLD_ITERATIONS = 30
# Batches behind the first estimate: one small batch may be far flatter than the next.
_FIRST_BATCHES = 8
# What an outer step leaves of an older, larger estimate. Small batches differ, and steps made for
# the flat ones would diverge on the others; a run that has become flatter forgets in time.
_KEPT = 0.99
# Where the lower level has no batches, only directions that were missed speak for older estimates.
_KEPT_EXACT = 0.95
# Where a lower level has no minimiser, as when a network fits its data without a penalty, its
# curvature fades away with its gradient. Steps of its inverse would grow for ever, until one of
# them leaves the flat region: the estimate does not fall below this share of the peak. The adjoint
# would grow for ever too: below that share it is damped, by as much.
_FADED = 1e-2
# The peak is that of an average over about 20 steps, which says nothing of single batches. Those of
# the first steps are forgotten, since a start may be far stiffer than all that follows.
_USUAL, _EARLY = 0.95, 20
# How far the curvature may jump in one outer step of a federation.
HASTY = 2.0


class Curvature(eqx.Module):
    """The step safety / l_max, with l_max the largest curvature of the lower objective.

    l_max is the largest eigenvalue (in size) of grad_yy g on minibatches: every outer step looks at
    one, by `iterations` power iterations from the vector of the step before and as many from a
    fresh one, and forgets 1 % of what it saw before. The first step looks at eight. The Hessian is
    not projected, since the skipped steps of ProxSkip are not.

    In a federation every client iterates with its own Hessian, and the step follows the largest of
    their estimates. The maximum rides on an existing round, so each step uses the previous value;
    the first costs one exchange. An outer step whose value turns out to have been less than half of
    what it should have been is not made: x and y stay where they were. With 1,000 clients and more,
    all of whom make every step on all of their data, E3-AiPOD looks in every eighth outer step,
    unless the curvature grows, falls quickly, or local steps run away. Without a server
    (`aipod.Gossip`) every client has its own estimate, the largest that it has found or heard of:
    the maximum goes from neighbour to neighbour, along with the messages that are sent anyway.

    **Arguments:**

    - `safety`: a factor on the step; below 1 is more careful.
    - `cap`: the longest step; by default there is none, since it would have units.
    - `iterations`: power iterations per outer step.
    - `tempered`: take shorter steps on y where they undo each other, that is where they follow
        noise: in `OneRound`, the lower level of E3-AiPOD, and in `ProjectedSGD` and `ProxSkip`,
        those of AiPOD, E-AiPOD and E2-AiPOD. With `upper_lr` they become shorter and shorter as
        the run goes on; where x finds its own pace there is a limit. Other slots ignore it.

    !!! example
        ```python
        solver = aipod.AiPOD(upper_lr=0.02, lower_lr=aipod.Curvature(safety=0.5))
        ```
    """

    safety: float = 1.0
    cap: float | None = None
    iterations: int = eqx.field(static=True, default=4)
    tempered: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_positive(self.safety, "Curvature: safety")
        if self.cap is not None:
            check_positive(self.cap, "Curvature: cap")
        check_steps(self.iterations, "Curvature: iterations")

    def value(self, estimate: Array | None) -> Array:
        """The step for an estimate of l_max."""
        if estimate is None:
            raise ValueError(
                "a Curvature step size needs an estimate of the curvature, which is made for the "
                "fields `lr` of the lower and the adjoint slot alone: name the field so, or give a "
                "number."
            )
        # Where nothing bends, no length is better than another. An estimate that has not come yet
        # over a network is NaN, and stays so.
        step = self.safety / jnp.where(estimate == 0, 1.0, estimate)
        return step if self.cap is None else jnp.minimum(self.cap, step)

    def halved(self) -> str:
        """A more careful choice, as text."""
        return f"Curvature(safety={float(self.safety) / 2:.3g})"


class CurvatureState(eqx.Module):
    """What is kept from one outer step to the next.

    - `vector`: the warm start of the power iteration.
    - `estimate`: the largest curvature, of earlier batches too; in gossip one for each client.
    - `first`: the estimate of the first step.
    - `usual`, `peak`: an average of the curvature over steps, and the largest so far.
    - `reach`: without clients, how far y moved in an outer step of late, at most; with many of
        them, the outer steps made without a look since the last one, or -1 where the next outer
        step must look.
    """

    vector: PyTree
    estimate: Array
    first: Array
    usual: Array
    peak: Array
    reach: Array

    def uneven(self) -> Array:
        """How much more than a usual batch the stiffest of late bends; at least 1."""
        usual = jnp.where(self.usual > 0, self.usual, 1.0)
        return jnp.where(self.usual > 0, jnp.maximum(self.estimate / usual, 1.0), 1.0)

    def damping(self) -> Array:
        """What the Hessian lacks where the lower level has lost its curvature; else 0."""
        faded = self.usual < _FADED * self.peak
        return jnp.where(faded, _FADED * self.peak, 0.0).astype(self.peak.dtype)


def curvature_iterations(*lrs: Any) -> int:
    """The power iterations that the most demanding of these step sizes asks for; 0 for none."""
    return max((lr.iterations for lr in lrs if isinstance(lr, Curvature)), default=0)


def curvature_draws(state: CurvatureState, step: Array, pause: int = 1) -> Array:
    """The batches that the estimate of an outer step looks at."""
    draws = jnp.where(step == 0, _FIRST_BATCHES, 1)
    return draws if pause == 1 else jnp.where(is_due(state.reach, step, pause), draws, 0)


def looked_at_next(state: CurvatureState, when: Array) -> CurvatureState:
    """With a look in the next outer step, where there is a pause between looks."""
    return dataclasses.replace(state, reach=jnp.where(when, AT_ONCE, state.reach))


def curvature_init(y: PyTree, lower_set: AbstractSet) -> CurvatureState:
    """A fixed pseudo-random start (`init` has no key)."""
    zero = jnp.zeros(lower_set.apart, jnp.result_type(*jax.tree.leaves(y)))
    return CurvatureState(_random(jax.random.key(0), y, lower_set), zero, zero, zero, zero, zero)


def _random(key: PRNGKeyArray, y: PyTree, lower_set: AbstractSet) -> PyTree:
    """A random direction; the same for every client, so that it does not depend on their number."""
    leaves, structure = jax.tree.flatten(y)

    def drawn(index: int, leaf: Array) -> Array:
        one = leaf[0] if lower_set.per_client else leaf
        return jnp.broadcast_to(signs(subkey(key, index), one), leaf.shape)

    return jax.tree.unflatten(structure, [drawn(i, leaf) for i, leaf in enumerate(leaves)])


def curvature_update(
    problem: Bilevel,
    x: PyTree,
    y: PyTree,
    state: CurvatureState,
    step: Array,
    iterations: int,
    *,
    key: PRNGKeyArray,
    pause: int = 1,
) -> tuple[CurvatureState, Array]:
    """Power iterations on grad_yy g at (x, y) and a batch, from the warm vector and a fresh one.

    The warm vector alone forgets directions while they are flat. The fresh one is half random and
    half the gradient, in which errors that grow stand out. The better of the two is kept.

    `pause`: outer steps from one look to the next, where nothing speaks for more.

    Returns the new state, and the estimate that this outer step may use.
    """
    objective, samples = problem.lower_at(x, draws=1)
    lower_set = problem.lower_set
    per_client = lower_set.per_client
    noise_key, batch_key = subkeys(key, 2)
    beside_each_other = per_client and not is_large(y)

    # The first step begins with so many more looks at its first batch. More iterations in one look
    # would be a second loop whose length depends on the step: a GPU asks its host about each turn
    # of such a loop, which takes longer than the turn where the problem is small.
    more = jnp.where(step == 0, _COLD_ITERATIONS // iterations, 0)

    # Where looks are rare all clients begin with one y, and only a look needs it for each of them.
    begun, shapes = y, jax.tree.map(jnp.shape, y)
    if pause > 1:
        begun = jax.tree.map(lambda leaf: leaf[:1], y)

    def look(index: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        warm, largest = carry
        y = jax.tree.map(jnp.broadcast_to, begun, shapes)
        batch = draw(samples, subkey(batch_key, jnp.maximum(index - more, 0)))
        # Linear in v: linearised once for all iterations.
        gradient = jax.grad(lambda t: objective(t, batch))
        slope, product = jax.linearize(gradient, y)
        slope = lower_set.riesz(slope)
        # Made anew for every look: as large as y, it would take its memory in steps without one.
        noise = unit(_random(noise_key, y, lower_set), per_client=per_client)
        fresh = optax.tree.add(noise, unit(slope, per_client=per_client))

        def iterated(start: PyTree) -> tuple[Array, PyTree]:
            # In the inner product of the set: that is the Hessian the steps along riesz(g) meet.
            return power_iteration(
                lambda v: lower_set.riesz(product(v)), start, iterations, per_client=per_client
            )

        if beside_each_other:
            starts = jax.tree.map(lambda a, b: jnp.stack([a, b]), warm, fresh)
            (old_size, new_size), both = jax.vmap(iterated)(starts)
            old = jax.tree.map(lambda leaf: leaf[0], both)
            new = jax.tree.map(lambda leaf: leaf[1], both)
        else:
            # One after the other: side by side they would take twice the memory.
            (old_size, old), (new_size, new) = iterated(warm), iterated(fresh)
        fresher = new_size > old_size
        vector = jax.tree.map(lambda a, b: jnp.where(beside(fresher, a), a, b), new, old)

        def slope_at(point: PyTree) -> PyTree:
            return lower_set.riesz(gradient(point))

        now = jnp.maximum(old_size, new_size)
        now = ahead(slope_at, y, slope, now, per_client=per_client)
        # An estimate that is too low looks too far ahead.
        return vector, jnp.where(index < more, largest, jnp.maximum(largest, now))

    none = jnp.zeros_like(norm(state.vector, per_client=per_client))
    draws = curvature_draws(state, step, pause)
    looks = more + draws
    vector, sizes = jax.lax.fori_loop(0, looks, look, (state.vector, none))
    now = lower_set.largest(sizes)
    kept: Any = _KEPT if is_random(samples) else _KEPT_EXACT
    stays: Any = _USUAL
    if pause > 1:
        kept, stays = after_a_pause(state.reach.astype(state.estimate.dtype), kept, stays)
    floor = jnp.maximum(kept * state.estimate, _FADED * state.peak)
    estimate = jnp.maximum(now, floor)
    estimate = jnp.where(step == 0, lower_set.heard(estimate), estimate)
    first = jnp.where(step == 0, estimate, state.first)
    usual = jnp.where(step == 0, now, stays * state.usual + (1 - stays) * now)
    peak = jnp.maximum(usual, jnp.where(step < _EARLY, kept, 1.0) * state.peak)
    reach = state.reach
    if pause > 1:
        reach = first_of_a_pause(estimate, state.estimate, now).astype(reach.dtype)
    new = CurvatureState(vector, estimate, first, usual, peak, reach)
    if pause > 1:
        # Without a look the vector has not moved, and is large.
        resting = dataclasses.replace(state, vector=vector, reach=state.reach + 1)
        new = jax.tree.map(lambda a, b: a if a is b else jnp.where(draws > 0, a, b), new, resting)
    if not per_client:
        return new, new.estimate
    used = jnp.where(step == 0, new.estimate, state.estimate)
    if lower_set.apart:
        # A client that is alone with its step size need not wait for the others.
        used = jnp.where(now > HASTY * used, now, used)
    return new, used


def curvature_heard(state: CurvatureState | None, lower_set: AbstractSet) -> CurvatureState | None:
    """With what clients have heard of each other in a round, where there is no server."""
    if state is None or not lower_set.apart:
        return state
    return dataclasses.replace(state, estimate=lower_set.heard(state.estimate))
