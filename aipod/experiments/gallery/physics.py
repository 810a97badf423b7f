"""Inverse problems: a blur, an unknown cost, and traffic."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jaxtyping import Array

from aipod.data import digits
from aipod.experiments.gallery.exhibit import Setting, as_floats
from aipod.experiments.tasks import tolls
from aipod.experiments.tasks.roads import equilibrium, sioux_falls, without_rare
from aipod.problem import Bilevel, FullBatch
from aipod.sets import Affine

Batch = tuple[Array, Array]


def deblurring() -> Setting:
    """Two log-weights of a smoothness prior, learned from 8 pairs of sharp and blurred digits.

    The blur removes fine detail nearly completely: at x0 the lower level has a condition number
    of about 1,000.
    """
    sharp = digits().train.images[:8].astype(float)
    # Along each axis of 8 pixels: a Gaussian blur, and differences between neighbours.
    gaps = np.arange(8)[:, None] - np.arange(8)[None]
    one = np.exp(-0.5 * gaps**2)
    one /= one.sum(axis=1, keepdims=True)
    steps = np.eye(8)[1:] - np.eye(8)[:-1]
    blur = np.kron(one, one)
    changes = np.vstack([np.kron(steps, np.eye(8)), np.kron(np.eye(8), steps)])
    noise = 0.02 * np.random.default_rng(0).normal(size=sharp.shape)
    images, seen = as_floats((sharp, sharp @ blur.T + noise))
    blur, changes = as_floats((blur, changes))

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        misfit = jnp.sum((y @ blur.T - batch[1]) ** 2)
        rough = jnp.exp(x[0]) * jnp.sum((y @ changes.T) ** 2)
        return 0.5 * (misfit + rough + jnp.exp(x[1]) * jnp.sum(y**2))

    problem = Bilevel(
        upper=lambda x, y, batch: 0.5 * jnp.sum((y - batch[0]) ** 2) + 1e-3 * jnp.sum(x**2),
        lower=lower,
        upper_samples=FullBatch((images, seen)),
        lower_samples=FullBatch((images, seen)),
    )
    return Setting(problem, jnp.full(2, jnp.log(1e-4)), jnp.zeros((8, 64)))


def control() -> Setting:
    """Inverse optimal control: the log-costs of a driver, from three drives that were observed.

    y are positions, speeds and accelerations over 15 steps of half a second; the laws of motion
    are A y = c. A unit of squared acceleration costs 1. x0 are costs of 1.
    """
    steps, time, true = 15, 0.5, np.array([0.3, 2.0, 8.0, 1.5])
    motion = np.array([[1.0, time], [0.0, 1.0]])
    push = np.array([time**2 / 2, time])
    size = 3 * steps
    laws, given = np.zeros((2 * steps, size)), np.zeros((3, 2 * steps))
    starts = np.array([[5.0, 0.0], [-3.0, 2.0], [1.0, -4.0]])
    for step in range(steps):
        rows = slice(2 * step, 2 * step + 2)
        laws[rows, 3 * step : 3 * step + 2] = np.eye(2)
        laws[rows, 3 * step + 2] = -push
        if step:
            laws[rows, 3 * step - 3 : 3 * step - 1] = -motion
    given[:, :2] = starts @ motion.T

    def costs(logs: np.ndarray) -> np.ndarray:
        """The cost of every entry of a drive: position, speed, acceleration; more at the end."""
        running = np.array([np.exp(logs[0]), np.exp(logs[1]), 1.0])
        whole = np.tile(running, steps)
        whole[-3:-1] += np.exp(logs[2:])
        return whole

    # The drives of the true costs: minimise sum(cost y^2) over laws y = given, in closed form.
    scaled = laws / costs(np.log(true))[None]
    drives = np.stack([_least(scaled, laws, one) for one in given])
    observed = as_floats(drives + 0.05 * np.random.default_rng(0).normal(size=drives.shape))

    def lower(x: Array, y: Array, _: Batch) -> Array:
        running = jnp.concatenate([jnp.exp(x[:2]), jnp.ones(1, x.dtype)])
        last = jnp.sum(jnp.exp(x[2:])[None] * y[:, -3:-1] ** 2)
        return 0.5 * (jnp.sum(jnp.tile(running, steps)[None] * y**2) + last)

    problem = Bilevel(
        upper=lambda x, y, drives: 0.5 * jnp.sum((y - drives) ** 2) + 1e-4 * jnp.sum(x**2),
        lower=lower,
        lower_set=Affine(np.kron(np.eye(3), laws), given.ravel()),
        upper_samples=FullBatch(observed),
    )
    return Setting(problem, jnp.zeros(4), jnp.zeros((3, size)))


def _least(scaled: np.ndarray, laws: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The point of least cost on laws y = given, by conjugate gradients on its multipliers."""
    multipliers, _ = scipy.sparse.linalg.cg(scaled @ laws.T, given, rtol=1e-12, maxiter=10_000)
    return scaled.T @ multipliers


def roads() -> Setting:
    """`tasks/tolls.py` on Sioux Falls with the trips to three of its nodes; batches of 16 days.

    The trips to the others are added to these, so that the streets are as full as before.
    """
    options = tolls.Options(batch_size=16)
    whole = sioux_falls()
    chosen = np.array([9, 15, 19])
    trips = np.zeros_like(whole.trips)
    trips[:, chosen] = whole.trips[:, chosen] * (
        0.5 * whole.trips.sum() / whole.trips[:, chosen].sum()
    )
    few = dataclasses.replace(whole, trips=trips)
    days = tolls.day_factors(options)
    flows = equilibrium(few, options.spread, days, np.zeros(len(few.capacity)), trips)
    task = tolls.build_on(without_rare(few, flows, 1e-3), options)
    return Setting(task.problem, task.x0, task.y0)
