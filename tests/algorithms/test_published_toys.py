"""The toy problems of LV-HBA and BiC-GAFFA, whose solutions are published.

Yao, Yu, Zeng and Zhang (ICLR 2024), and Yao, Yin, Zeng and Zhang (NeurIPS 2024); see
`benchmarks/published_toys.py`, which compares seconds and samples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod

SIZE = 20


def lower(x, y, _):
    first, second = y
    # The last term picks the one lower solution with equal entries, which is the best for f.
    chosen = 0.5 * jnp.sum((second - jnp.mean(second)) ** 2)
    return 0.5 * first @ first - x @ first + jnp.sum(second) + chosen


def upper_lv(x, y, _):
    return 0.5 * jnp.sum((x - y[1]) ** 2) + 0.5 * jnp.sum((y[0] - 1) ** 2)


def upper_gaffa(x, y, _):
    return (y[0] - 2) @ (x - 1) + jnp.sum((y[1] + 3) ** 2)


TOYS = {
    "LV-HBA": (upper_lv, jnp.sum, 10.0, 1 / 9, (-0.3, 0.7, -0.4)),
    "BiC-GAFFA, linear": (upper_gaffa, jnp.sum, 0.0, 1 / 40, (1.0, 2.0, -3.0)),
    "BiC-GAFFA, cubic": (upper_gaffa, lambda x: jnp.sum(x**3), 0.0, 1 / 40, (1.0, 2.0, -3.0)),
}


@pytest.mark.parametrize("name", TOYS)
def test_aipod_finds_the_published_solution(name):
    upper, shift, start, lr, solution = TOYS[name]
    x0, y0 = jnp.full(SIZE, start), (jnp.full(SIZE, start),) * 2
    weights = jax.tree.map(jnp.ones_like, y0)
    problem = aipod.Bilevel(upper, lower, lower_set=aipod.Budget(0.0, weights, coupling=shift))
    solver = aipod.AiPOD(upper_lr=lr, lower_lr=1.0, adjoint_lr=1.0, adjoint_steps=60)
    found = aipod.solve(problem, solver, x0, y0, steps=400, key=jax.random.key(0))
    for part, value in zip((found.x, *found.y), solution, strict=True):
        np.testing.assert_allclose(part, value, atol=1e-9)
