"""Learns the cost of journeys from where people work.

The lower level is an entropic optimal transport problem: how the people of 3 districts spread over
3 places of work. The upper level finds the cost that explains the journeys. A cost is determined
only up to a_i + b_j, so the upper level is constrained to rows and columns that sum to zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aipod
from aipod.experiments.tasks.entropy import entropy, logarithm
from aipod.experiments.tasks.transport import centred, marginals, sinkhorn

minutes = np.array([[5.0, 20.0, 30.0], [20.0, 5.0, 15.0], [30.0, 10.0, 5.0]])  # to be found
homes, jobs, spread = np.array([0.3, 0.3, 0.4]), np.array([0.5, 0.3, 0.2]), 10.0
journeys = jnp.asarray(sinkhorn(minutes / spread, homes, jobs))

sums = marginals(3, 3)  # all row sums, then all column sums: one of the six follows from the others
problem = aipod.Bilevel(
    upper=lambda cost, plan, _: -jnp.sum(journeys * logarithm(plan, 1e-4)),  # likelihood
    lower=lambda cost, plan, _: jnp.sum(cost * plan + spread * entropy(plan, 1e-4)),
    upper_set=aipod.Affine(sums),
    lower_set=aipod.Affine(sums, np.concatenate([homes, jobs])),
)
start = jnp.asarray(np.outer(homes, jobs))
solution = aipod.solve(
    problem,
    aipod.AiPOD(upper_optimizer=optax.adam(0.1), lower_steps=30, adjoint_steps=50),
    jnp.zeros((3, 3)),
    start,
    steps=1000,
    key=jax.random.key(0),
)
cost, plan = solution.feasible()

print(
    "true cost, rows and columns centred:\n",
    np.asarray(centred(jnp.asarray(minutes))).astype(float).round(1),
)
print("learned from the journeys:\n", np.asarray(cost).astype(float).round(1))
print(f"largest error of a share of the journeys: {float(jnp.max(jnp.abs(plan - journeys))):.1e}")
