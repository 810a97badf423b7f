"""A constrained bilevel problem from start to end: a portfolio and its factor exposure.

Lower level: the weights y with the least risk that sum to one and have factor exposure x.
Upper level: the exposure x that does best on new returns.
"""

import jax
import jax.numpy as jnp

import aipod

assets, days = 12, 400
keys = jax.random.split(jax.random.key(0), 4)
exposure = jax.random.normal(keys[0], (1, assets))  # how each asset follows the one factor
means = 0.02 + 0.05 * exposure[0]


def returns(key: jax.Array) -> jax.Array:
    factor, own = jax.random.split(key)
    common = 0.3 * jax.random.normal(factor, (days, 1)) * exposure
    return means + common + 0.2 * jax.random.normal(own, (days, assets))


def loss(weights: jax.Array, sample: jax.Array) -> jax.Array:
    gains = sample @ weights
    return jnp.var(gains) - 0.5 * jnp.mean(gains)


problem = aipod.Bilevel(
    upper=lambda x, y, batch: loss(y, batch),
    lower=lambda x, y, batch: loss(y, batch) + 0.05 * jnp.sum(y**2),
    # rows: the weights sum to 1; their exposure equals x. As A y + h(x) = c with h(x) = (0, -x):
    lower_set=aipod.Affine(
        jnp.concatenate([jnp.ones((1, assets)), exposure]),
        jnp.array([1.0, 0.0]),
        coupling=lambda x: jnp.array([0.0, -1.0]) * x,
    ),
    upper_samples=aipod.Minibatches(returns(keys[1]), 64),
    lower_samples=aipod.Minibatches(returns(keys[2]), 64),
)

x0, y0 = jnp.zeros(1), jnp.zeros(assets)
solution = aipod.solve(
    problem,
    aipod.EAiPOD(upper_lr=0.2, lower_prob=0.3, lower_steps=10, adjoint_steps=20),
    x0,
    y0,
    steps=1000,
    key=keys[3],
    every=200,
    record=lambda x, y: {"exposure": x[0], "|grad F|^2": aipod.stationarity(problem, x)},
    progress=True,
)
x, y = solution.feasible()

print("step   projections of y   exposure   |grad F|^2")
for step, projections, chosen, slope in zip(
    *(solution.history[k] for k in ("step", "lower_projections", "exposure", "|grad F|^2")),
    strict=True,
):
    print(f"{step:5d}   {projections:16d}   {chosen:8.4f}   {slope:10.2e}")
print(f"\n{solution.message}")
print(f"weights sum to {float(jnp.sum(y)):.6f}; exposure {float((exposure @ y)[0]):.4f} = x")
print(f"ordinary projected steps would have projected y {1000 * 10} times")
