"""What `check` says about bounds."""

import jax
import jax.numpy as jnp
import pytest

import aipod

KEY = jax.random.key(0)


def problem_at(target, lower_set=None, upper_set=None):
    """y* is the projection of the target, moved by x."""
    return aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(y**2) + jnp.sum((x - 0.3) ** 2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y - jnp.asarray(target) - 0.1 * x[0]) ** 2),
        upper_set=aipod.Box(0.0, 1.0) if upper_set is None else upper_set,
        lower_set=aipod.Box(0.0, 1.0) if lower_set is None else lower_set,
    )


@pytest.mark.parametrize(
    ("target", "lower_set", "active", "strict", "says"),
    [
        ([-1.0, 0.5, 2.0], None, 2, True, "2 bounds of 3 entries of y*(x0) active, with mult"),
        ([-1.0, -0.05, 2.0], None, 3, False, "1 of them with a multiplier of about 0"),
        ([-1.0, -3.0, 2.0], None, 3, True, "y* moves with x only as the bounds do"),
        ([0.3, 0.5, 0.2], None, 0, True, "0 bounds of 3"),
        ([-1.0, 0.5, 2.0], aipod.Simplex(), 2, True, "2 bounds of 3"),
        ([0.2, 0.5, 0.2], aipod.Box([0.25, 0.0, 0.0], [0.25, 1.0, 1.0]), 1, True, "1 bound of 3"),
    ],
)
def test_active_bounds_and_degenerate_ones(target, lower_set, active, strict, says):
    problem = problem_at(target, lower_set)
    report = aipod.check(problem, jnp.array([0.5, 0.2]), jnp.zeros(3), key=KEY)
    assert report.ok
    assert (report.active_bounds, report.strictly_complementary) == (active, strict)
    words = next(found for found in report.findings if found.name == "bounds")
    assert says in words.value
    assert (words.status == "ok") == strict
    assert (words.remedy == "") == strict
    if strict:
        assert not report.hypergradient_error > 1e-6
        assert report.suggested["upper_lr"] > 0


def test_a_part_without_bounds_and_a_start_in_a_corner():
    sets = aipod.Product([aipod.Free(), aipod.Simplex()])
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(y[0] ** 2) + y[1] @ jnp.arange(3.0) + jnp.sum(x),
        lambda x, y, _: 0.5 * jnp.sum((y[0] - x[0]) ** 2) + 0.5 * jnp.sum((y[1] - 2 * x) ** 2),
        upper_set=aipod.Simplex(),
        lower_set=sets,
    )
    y0 = [jnp.zeros(2), jnp.zeros(3)]
    report = aipod.check(problem, jnp.array([0.1, 0.2, 0.7]), y0, key=KEY)
    assert report.ok
    assert (report.active_bounds, report.strictly_complementary) == (2, False)
    assert "not compared with finite differences: F has a kink here" in str(report)
    report = aipod.check(problem, jnp.array([0.0, 0.3, 0.7]), y0, key=KEY)
    assert (report.active_bounds, report.strictly_complementary) == (1, True)
    assert not report.hypergradient_error > 1e-6
    report = aipod.check(problem, jnp.array([0.0, 0.0, 1.0]), y0, key=KEY)
    assert report.ok
    assert "x0 is in a corner of the upper set" in str(report)


def test_an_empty_lower_set_is_named():
    problem = problem_at([0.0, 0.0, 0.0], aipod.Box(lambda x: x[0] * jnp.ones(3), 0.4))
    report = aipod.check(problem, jnp.array([0.5, 0.2]), jnp.zeros(3), key=KEY)
    assert not report.ok
    assert "lower exceeds upper in 3 of 3 entries" in str(report)
