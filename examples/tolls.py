"""Tolls on Braess's network: drivers choose their routes, the city chooses the tolls.

Six thousand drivers go from node 0 to node 3, mostly on the quickest route. The bridge from 1 to 2
draws many of them onto the same two roads. Tolls that are revenue-neutral for the city spread them
over the routes, and on average they arrive earlier. `aipod run tolls` does the same
for Sioux Falls.
"""

import jax
import jax.numpy as jnp
import optax

import aipod
from aipod.experiments.tasks.entropy import entropy

senders, receivers = jnp.array([0, 0, 1, 1, 2]), jnp.array([1, 2, 2, 3, 3])
names = ["0 to 1", "0 to 2", "1 to 2 (bridge)", "1 to 3", "2 to 3"]
empty = jnp.array([1.0, 5.0, 0.5, 5.0, 1.0])  # minutes when nobody is there
slowing = jnp.array([1.0, 0.1, 0.1, 0.1, 1.0])  # minutes for every thousand drivers
drivers = 6.0

present = jnp.array([4.0, 2.0, 2.0, 2.0, 4.0])


def travel_time(flows):
    return jnp.sum(flows * (empty + slowing * flows))


def choice(tolls, flows, _):
    """The function that the drivers' equilibrium minimises; an entropy spreads them over routes."""
    spread = jnp.sum(entropy(flows, 1e-2))  # y log y, continued below 0.01
    return jnp.sum((empty + tolls) * flows + slowing * flows**2 / 2) + 0.5 * spread


problem = aipod.Bilevel(
    upper=lambda tolls, flows, _: travel_time(flows) + 0.05 * jnp.sum(tolls**2),
    lower=choice,
    upper_set=aipod.Budget(0.0, present),  # revenue-neutral at present flows
    lower_set=aipod.Flow(senders, receivers, drivers * jnp.array([-1.0, 0.0, 0.0, 1.0])),
)
no_tolls = jnp.zeros(5)
before = aipod.exact_lower(problem, no_tolls, present)
solution = aipod.solve(
    problem,
    aipod.AiPOD(upper_optimizer=optax.adam(0.05), lower_steps=10, adjoint_steps=30),
    no_tolls,
    before,
    steps=300,
    key=jax.random.key(0),
)
tolls, after = solution.feasible()

print("road              toll   drivers before   drivers after")
for name, toll, then, now in zip(names, tolls, before, after, strict=True):
    print(f"{name:15s} {toll:6.2f} {then:16.2f} {now:15.2f}")
print(f"minutes per driver: {float(travel_time(before)) / drivers:.2f} without tolls,", end=" ")
print(f"{float(travel_time(after)) / drivers:.2f} with them")
