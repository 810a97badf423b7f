"""Shorter steps on y where they follow noise: the step size as a share of the curvature's.

Two moves of y that follow each other, by a and then by b, agree by

    R = ||a + b||^2 / (||a||^2 + ||b||^2),

2 when they are alike, 1 when they know nothing of each other, less when b undoes a. Long steps
carry noise into y that the next ones carry out again, so that in noise R is below 1. Which moves
are compared depends on what a slot can see.

`ProjectedSGD` and `ProxSkip` make few steps in an outer step, or one, and project in between. Only
points that were projected are compared: a projection undoes the noise off the set, and that of
single clients, however short the steps are. a leads from the mean of these points over the last 100
outer steps to the last of them, and b from there to the new one. The share falls while R is below
1: a lag behind y*(x) pulls it above 1 and noise below, and 1 is where both cost about the same, if
all directions bend alike. They do not, and a lag in flat directions does not show beside the noise
of the others. So in outer step k the share does not fall below h / sqrt(1 + k): steps that fade
like this still lead everywhere in time. h is the curvature that the step obeys, that of the
stiffest batch of late, over that of a usual batch, and at least 2: with heavy tails the whole step
is already short for the usual batch, and fades later. Early on the mean is over the last quarter of
the run alone: the way from the start of y is long beside the noise, and would hide it.

Of `OneRound` they are at first the two halves of its S local steps. On convex quadratics without
noise R is at least 1 for every step beta up to 1 / l, because the steps are (I - beta G)^s d, no
two of which point apart. Where there is nothing but noise, R is (1 + exp(-S beta l / 2)) / 2. The
share falls while R is below 3/4 and grows otherwise, up to 1. In mere noise it so rests at
beta = 1.4 / (S l), where y averages over about the samples of one outer step. On a noiseless
problem it stays at 1. Where x has a step size of its own, a second share t, with which the first is
multiplied, falls as that of the other slots does, with h = 2. The first is then compared with
(1 + 2^(-t)) / 2, which is 3/4 for t = 1, so that beta rests at 1.4 t / (S l), and y averages over
more and more outer steps. Between clients it rests further up: their corrections have noise too,
which moves both halves alike.

Where x finds its own pace, the share of `ProjectedSGD` and `ProxSkip` does not fall below 1/2: such
an x slows down where y is behind. (With 1/4 hyper-cleaning on the gallery came to between 88 and
99.7 % in place of 99 %.) There the mean is over 100 outer steps from the first on; a shorter one
shortened steps sooner, and class-weights on the gallery fell from 95.2 to 92.7 %.

Where batches are not random there is no noise, and y that turns back follows x: the share stays
at 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy, rounding
from aipod.sets import AbstractSet
from aipod.stepsize._curvature import Curvature
from aipod.stepsize._stepsize import StepSize

# Where the share of local steps rests. Nearer to 1 averages more, and is slower where noise is not
# the trouble.
_BALANCE = 0.75
# log(share) moves by this times R - 3/4, but by no more than half of it, in one outer step.
_PACE = 0.4
_LEAST_SHARE = 1e-3
# The same between projected points, the least share where x finds its own pace, and elsewhere how
# many times 1 / sqrt(1 + k) it is at least.
_EVEN, _LEAST_OF_PACED, _LATER = 1.0, 0.5, 2.0
# Local steps run away where the squared length of their second half is so many times that of the
# first, which steps of up to 2 / l never do on a convex quadratic; moves by so many rounding errors
# of y tell nothing.
_RUNS_AWAY, _ROUNDED = 16.0, 100.0
# How many outer steps the mean of these points looks back, and early on which part of the run.
_MEMORY, _PART = 100, 4.0


def is_tempered(lr: StepSize) -> bool:
    """Whether a step size asks for shorter steps in noise."""
    return isinstance(lr, Curvature) and lr.tempered


def agreement(
    lower_set: AbstractSet, start: PyTree, middle: PyTree, end: PyTree
) -> tuple[Array, Array]:
    """R, over all clients, 1 where nothing moved; and whether local steps ran away.

    They did where the second half of them led much further than the first one.
    """
    start, one = _from_one_row(lower_set, start), one_of(lower_set, start)
    measure = jax.vmap(_square) if lower_set.per_client else _square
    whole = lower_set.summed(measure(start, end))
    first, second = (lower_set.summed(measure(*e)) for e in ((start, middle), (middle, end)))
    members = 1
    if lower_set.per_client:
        members = lower_set.members_in_all(jax.tree.leaves(start)[0].shape[0])
    nothing = members * (_ROUNDED * rounding(one)) ** 2 * optax.tree.norm(one, squared=True)
    # Not a number, or infinite, counts too.
    away = ~(second <= _RUNS_AWAY * jnp.maximum(first, nothing))
    return _ratio(whole, first + second), away


def _from_one_row(lower_set: AbstractSet, y: PyTree) -> PyTree:
    """y, from one of its rows where clients begin with the same one.

    XLA must then not keep the y of all clients for the end of the local steps, which write over it.
    """
    if not lower_set.together:
        return y
    row = jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[:1], y))
    return jax.tree.map(lambda one, leaf: jnp.broadcast_to(one, leaf.shape), row, y)


def _square(before: PyTree, after: PyTree) -> Array:
    way = optax.tree.sub(after, before)
    return optax.tree.vdot(way, way)


def _ratio(whole: Array, halves: Array) -> Array:
    return jnp.where(halves > 0, whole / jnp.where(halves > 0, halves, 1.0), 1.0)


def tempered(
    share: Array,
    agreement: Array,
    *,
    balance: Array | float = _BALANCE,
    least: Array | float = _LEAST_SHARE,
) -> Array:
    """The share of the step that the next outer step takes."""
    change = jnp.exp(_PACE * jnp.clip(agreement - balance, -0.5, 0.5))
    return jnp.clip(share * change, least, 1).astype(share.dtype)


def balance_within(outer: Array | float) -> Array | float:
    """Where the agreement of local steps rests once they are this share of what they were."""
    # exp(-S beta l / 2), which is 1/2 at rest, to this power.
    return (1 + (2 * _BALANCE - 1) ** outer) / 2


class Tempering(eqx.Module):
    """What a slot keeps that compares projected points.

    - `share`: the share of the curvature's step in force.
    - `mean`: of the projected points, over about the last 100 outer steps.
    - `last`: the last of them, where an outer step may end without a projection; else None.

    Where clients agree, the points are those of one client: after a projection all have the same,
    so that nothing has to be sent.
    """

    share: Array
    mean: PyTree
    last: PyTree | None = None

    @staticmethod
    def first(
        lr: StepSize, lower_set: AbstractSet, y: PyTree, *, skips: bool = False
    ) -> "Tempering | None":
        """Before the first step; None where steps are not tempered.

        They are not where clients have no server: each would see the noise of its neighbours.

        `skips`: whether the slot skips projections.
        """
        if not is_tempered(lr) or lower_set.apart:
            return None
        point = one_of(lower_set, y)
        share = jnp.ones((), jnp.result_type(*jax.tree.leaves(y)))
        return Tempering(share, point, point if skips and lower_set.constrained else None)

    def after(
        self,
        before: PyTree,
        point: PyTree,
        projected: Array | bool = True,
        *,
        step: Array,
        paced: bool,
        uneven: Array | float = 1.0,
    ) -> "Tempering":
        """After an outer step that led from one projected point to another, if it has `projected`.

        Both points are those of one client. `step`: the outer steps made before this one. `paced`:
        whether x finds its own pace. `uneven`: the curvature of the stiffest batch of late over
        that of a usual one.
        """
        halves = _square(self.mean, before) + _square(before, point)
        agreed = _ratio(_square(self.mean, point), halves)
        least: Array | float = _LEAST_OF_PACED
        weight: Array | float = 1 / _MEMORY
        if not paced:
            least = jnp.minimum(1.0, jnp.maximum(_LATER, uneven) / jnp.sqrt(1.0 + step))
            weight = jnp.maximum(weight, _PART / (_PART + step))
        share = tempered(self.share, agreed, balance=_EVEN, least=least)
        mean = axpy(self.mean, weight, optax.tree.sub(before, self.mean))
        new = Tempering(share, mean, None if self.last is None else point)
        return jax.tree.map(lambda a, b: jnp.where(projected, a, b), new, self)


def one_of(lower_set: AbstractSet, y: PyTree) -> PyTree:
    """The point of one client, where all have the same after a projection; else y."""
    return jax.tree.map(lambda leaf: leaf[0], y) if lower_set.per_client else y
