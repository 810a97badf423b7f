"""What `check` says about moves of x: steps that were tried, curvature that depends on x."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import aipod
from aipod.experiments.gallery import PROBLEMS

KEY = jax.random.key(0)


def finding(report, name):
    return [f for f in report.findings if f.name == name]


@pytest.mark.parametrize("name", ["ridge", "ridge-features", "pricing"])
def test_the_suggested_step_does_not_make_f_worse(name):
    exhibit = PROBLEMS[name]()
    report = aipod.check(exhibit.problem, exhibit.x0, exhibit.y0, key=KEY)
    solver = aipod.Alternating(
        aipod.ProjectedSGD(lr=report.suggested["lower_lr"], steps=200),
        aipod.ConjugateGradient(),
        aipod.EveryStep(lr=report.suggested["upper_lr"]),
    )
    found = aipod.solve(exhibit.problem, solver, exhibit.x0, exhibit.y0, 20, key=KEY)
    assert exhibit.value(found.x) < exhibit.start


def test_a_step_that_overshoots_is_halved_until_it_does_not():
    """F = log(2 cosh(3 (x - 2))) is nearly straight at 1.2: 1 / its curvature there is 3.4."""
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(jnp.logaddexp(3 * (y - 2), -3 * (y - 2))),
        lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    )
    report = aipod.check(problem, jnp.full(1, 1.2), jnp.zeros(1), key=KEY)
    # The slope is -2.95: the step must not throw x further beyond 2 than it was before it.
    assert 0 < 2.95 * report.suggested["upper_lr"] <= 1.6


def test_large_problems_and_float32_get_a_step_too():
    size = 1500
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1) ** 2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    )
    x0 = jnp.full(size, 3.0)
    report = aipod.check(problem, x0, jnp.full(size, 3.0), key=KEY)
    # grad F = 2 (x - 1) = 4 at y = x: a hundredth of x is 0.03.
    assert report.suggested["upper_lr"] == pytest.approx(0.03 / 4, rel=1e-3)


def test_curvature_that_depends_on_x_is_noticed():
    steep = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(y**2),
        lower=lambda x, y, _: 0.5 * jnp.sum(jnp.exp(20 * x) * (y - 1) ** 2),
    )
    report = aipod.check(steep, jnp.ones(3), jnp.zeros(3), key=KEY)
    (found,) = finding(report, "curvature and x")
    assert found.status == "warning"
    assert "Curvature()" in found.remedy
    mild = aipod.Bilevel(steep.upper, lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2))
    (found,) = finding(aipod.check(mild, jnp.ones(3), jnp.zeros(3), key=KEY), "curvature and x")
    assert found.status == "ok"


@pytest.mark.parametrize("name", ["upper", "lower"])
def test_an_objective_that_reads_something_else_is_found(name):
    calls = itertools.count()
    parts = {
        "upper": lambda x, y, _: jnp.sum(y**2),
        "lower": lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    }
    plain = parts[name]
    parts[name] = lambda x, y, batch: plain(x, y, batch) + 0.1 * next(calls)
    report = aipod.check(aipod.Bilevel(**parts), jnp.ones(2), jnp.zeros(2), key=KEY)
    assert not report.ok
    assert any("for the same x, y and batch" in f.value for f in finding(report, name))
