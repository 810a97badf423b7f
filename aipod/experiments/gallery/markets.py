"""Problems of economics: one party decides, and others answer."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod.experiments.gallery.exhibit import Setting, as_floats
from aipod.experiments.tasks import portfolio, transport
from aipod.problem import Bilevel, Minibatches
from aipod.sets import Affine

# Four goods: what the first unit is worth to a buyer, how fast that falls with the quantities of
# all goods (they replace one another), and what a unit costs the seller.
_WORTH = np.array([240.0, 200.0, 260.0, 180.0])
_FALL = 0.6 * np.eye(4) + 0.4 * np.array(
    [[1.0, 0.6, 0.2, 0.1], [0.6, 1.0, 0.3, 0.1], [0.2, 0.3, 1.0, 0.4], [0.1, 0.1, 0.4, 1.0]]
)
_COST = np.array([90.0, 60.0, 120.0, 70.0])


def pricing() -> Setting:
    """A seller's prices, started at 100, and the quantities that a buyer takes at them.

    What goods are worth varies from day to day; batches are 8 of 250 days.
    """
    rng = np.random.default_rng(0)
    days = _WORTH * rng.lognormal(0.0, 0.15, size=(250, 4))
    days = as_floats(days * (_WORTH / days.mean(axis=0)))
    fall, cost = as_floats((_FALL, _COST))

    def lower(x: Array, y: Array, worth: Array) -> Array:
        return 0.5 * y @ fall @ y - (jnp.mean(worth, axis=0) - x) @ y

    problem = Bilevel(
        upper=lambda x, y, _: -(x - cost) @ y,
        lower=lower,
        lower_samples=Minibatches(days, 8),
    )
    return Setting(problem, jnp.full(4, 100.0), jnp.zeros(4))


def shares() -> Setting:
    """`tasks/portfolio.py`: returns of 20 shares, batches of 64 weeks; x is in a Budget."""
    task = portfolio.build(portfolio.Options())
    return Setting(task.problem, task.x0, task.y0)


def journeys() -> Setting:
    """`tasks/transport.py` with 5 by 4 districts and 2,000 journeys, in batches of 64."""
    options = transport.Options(homes=5, works=4, journeys=2000, batch_size=64)
    task = transport.build(options)
    return Setting(task.problem, task.x0, task.y0)


def dispatch() -> Setting:
    """Three regions trade power: x are the flows on three lines in MW, started at 0.

    The plants of each region must meet its demand with what the lines bring, A y + h(x) = c; a line
    loses a share of its flow that grows with it. The plants minimise their own cost, the upper
    level counts their emissions and the wear of the lines too.
    """
    rng = np.random.default_rng(1)
    region = np.repeat(np.arange(3), 4)
    slope = rng.uniform(10, 60, 12) + np.array([0.0, 15.0, 30.0])[region]
    bend = rng.uniform(0.02, 0.2, 12)
    carbon = 25.0 * rng.uniform(0.0, 1.0, 12)
    demand = np.array([700.0, 900.0, 1100.0])
    slope, bend, carbon = as_floats((slope, bend, carbon))
    # Line l leads from region l to the next.
    senders, receivers = np.arange(3), np.array([1, 2, 0])

    def brought(x: Array) -> Array:
        """What each region gets from the lines; the losses are shared by both ends."""
        lost = 1e-4 * x**2 / 2
        return jnp.zeros(3).at[receivers].add(x - lost).at[senders].add(-x - lost)

    def lower(x: Array, y: Array, _: None) -> Array:
        return jnp.sum(slope * y + 0.5 * bend * y**2)

    problem = Bilevel(
        upper=lambda x, y, _: lower(x, y, None) + carbon @ y + 0.01 * jnp.sum(x**2),
        lower=lower,
        lower_set=Affine(np.eye(3)[:, region], demand, coupling=brought),
    )
    return Setting(problem, jnp.zeros(3), as_floats((demand / 4)[region]))
