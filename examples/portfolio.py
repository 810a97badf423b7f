"""A calm portfolio: the upper level chooses factor exposures, the lower level the weights.

Real weekly returns of 20 shares. The weights are fitted to 2014-2018 under the constraint that they
add up to one and have exactly the exposures x; the exposures are chosen on 2019-2020; 2021-2022 is
the test period. `aipod run portfolio` is the same with figures.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aipod
from aipod.experiments.tasks import portfolio

data, task = portfolio.market(), portfolio.build(portfolio.Options())
solution = aipod.solve(
    task.problem,
    aipod.EAiPOD(
        upper_optimizer=optax.adam(0.02),
        lower_lr=aipod.Curvature(0.2),
        lower_steps=20,
        lower_prob=0.3,  # seven projections in ten are skipped
        adjoint_steps=60,
    ),
    task.x0,
    task.y0,
    steps=1000,
    key=jax.random.key(0),
)
x, y = solution.feasible()

print("exposures   ", *(f"{name:>6s}" for name in data.factors))
for label, point in (("equal weights", task.x0), ("chosen", x)):
    print(f"{label:13s}", *(f"{value:6.2f}" for value in np.asarray(point["exposures"])))
print("\nvolatility, % a year   training  validation  test")
for label, weights in (("equal weights", task.y0), ("chosen", y)):
    periods = (data.train, data.validation, data.test)
    found = (float(portfolio.volatility(weights, jnp.asarray(part))) for part in periods)
    print(f"{label:20s}", *(f"{value:10.1f}" for value in found))
print(f"\nprojections of the weights: {solution.ledger.lower_projections} in {1000 * 20} steps")
