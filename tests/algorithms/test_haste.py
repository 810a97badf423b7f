"""Steps that are taken back: y thrown far beyond its usual reach, or out of all numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod

KEY = jax.random.key(0)


def cliff(beyond):
    """g is flat up to 1 and bends ten thousand times more, or has no value, beyond it."""

    def lower(x, y, _):
        flat = 0.5 * jnp.sum((y - x) ** 2)
        over = jnp.maximum(y - 1.0, 0.0)
        wall = jnp.where(y > 1.0, jnp.nan, 0.0) if beyond == "nothing" else 5e3 * over**2
        return flat + jnp.sum(wall)

    return aipod.Bilevel(lambda x, y, _: 0.5 * jnp.sum((y - 0.9) ** 2), lower)


def test_a_jump_is_taken_back_and_the_run_goes_on():
    """x pushes y over the edge from one outer step to the next."""
    problem = cliff("wall")
    solver = aipod.AiPOD(upper_lr=lambda k: jnp.where(k == 80, 30.0, 0.05))
    solution = aipod.solve(problem, solver, jnp.zeros(2), jnp.zeros(2), 400, key=KEY, throw=False)
    assert solution.result == aipod.Result.completed
    assert float(jnp.max(jnp.abs(solution.y))) < 2


def test_what_is_no_number_for_good_is_still_reported():
    """Each try is shorter; after a few of them the run says that it diverged."""
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - 1.0) ** 2),
        lambda x, y, _: 0.5 * jnp.sum(jnp.where(x > 0.2, jnp.nan, 1.0) * (y - x) ** 2),
    )
    solver = aipod.AiPOD(upper_lr=0.05)
    solution = aipod.solve(problem, solver, jnp.zeros(2), jnp.zeros(2), 400, key=KEY, throw=False)
    assert solution.result == aipod.Result.diverged


@pytest.mark.parametrize("solver", [aipod.AiPOD, aipod.E3AiPOD])
def test_nothing_is_taken_back_where_all_is_well(solver):
    problem = aipod.Bilevel(
        lambda x, y, _: 0.5 * jnp.sum((y - 1.0) ** 2) + 0.5 * jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    )
    one = solver(upper_lr=0.2)
    solution = aipod.solve(problem, one, jnp.zeros(2), jnp.zeros(2), 300, key=KEY)
    np.testing.assert_allclose(solution.x, 0.5, atol=1e-10)
    assert float(solution.state.curvature.estimate) == pytest.approx(1.0, rel=1e-6)
