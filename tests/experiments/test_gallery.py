"""The gallery: references that hold by another route, exact changes of units, and the table."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod.experiments.gallery import PROBLEMS, SETTINGS, in_units, markets, stored
from aipod.experiments.gallery.catalogue import ENTRIES
from aipod.experiments.tasks import transport
from benchmarks import divergence
from benchmarks import gallery as benchmark
from benchmarks import gallery_checks as checks
from benchmarks.gallery_references import reference

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@functools.cache
def built(name):
    """One exhibit for all tests: what is compiled for it is found again."""
    return PROBLEMS[name]()


def test_every_problem_has_a_reference_and_a_world():
    assert set(stored.references()) == set(PROBLEMS) == set(SETTINGS)
    assert len(PROBLEMS) >= 17
    assert len({entry.world for entry in ENTRIES.values()}) == len(PROBLEMS)
    assert all(entry.convex for entry in ENTRIES.values())


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_stored_reference_is_a_minimum(name):
    """By exact_lower and conjugate gradients; the stored numbers come from dense matrices."""
    exhibit = built(name)
    problem, y0 = exhibit.problem, exhibit.y0
    problem.check(exhibit.x0, y0)
    start, best = exhibit.value(exhibit.x0), exhibit.value(exhibit.solution)
    np.testing.assert_allclose([start, best], [exhibit.start, exhibit.best], rtol=1e-8)
    assert exhibit.share(start) == pytest.approx(0, abs=1e-6)
    assert exhibit.share(best) == pytest.approx(1, abs=1e-6)
    upper_set = problem.upper_set
    for x in (exhibit.x0, exhibit.solution):
        size = float(optax.tree.norm(x)) + 1
        gap = optax.tree.norm(optax.tree.sub(upper_set.project(x), x))
        assert float(gap) < 1e-12 * size
    # No nearby point is better, and F is flat: to both sides it rises by the same amount.
    far = float(optax.tree.norm(optax.tree.sub(exhibit.solution, exhibit.x0)))
    shift = upper_set.tangent(optax.tree.random_like(jax.random.key(1), exhibit.x0))
    size = 1e-3 * far / float(optax.tree.norm(shift))
    steps = (optax.tree.scale(sign * size, shift) for sign in (1, -1))
    rise = [exhibit.value(optax.tree.add(exhibit.solution, s)) - exhibit.best for s in steps]
    assert min(rise) > 0
    assert max(rise) < 1.5 * min(rise) + 1e-9 * (exhibit.start - exhibit.best)


@pytest.mark.parametrize("name", ["poisoning", "transport", "dispatch", "federated-ridge"])
def test_the_stored_reference_is_stationary(name):
    exhibit = built(name)
    before, after = (
        float(aipod.stationarity(exhibit.problem, x, exhibit.y0))
        for x in (exhibit.x0, exhibit.solution)
    )
    assert after < 1e-10 * before


@pytest.mark.parametrize("name", ["ridge", "federated-trust"])
def test_references_are_found_again(name):
    found, slope = reference(name)
    known = stored.references()[name]
    assert slope < 1e-6
    np.testing.assert_allclose([found.start, found.best], [known.start, known.best], rtol=1e-9)
    np.testing.assert_allclose(found.solution, known.solution, rtol=1e-4, atol=1e-4)


def test_the_best_prices_are_the_closed_form():
    best = (markets._WORTH + markets._COST) / 2
    np.testing.assert_allclose(built("pricing").solution, best, rtol=1e-8)


def test_the_best_fit_of_journeys_is_the_closed_form():
    """A free cost and free homes can fit the observed shares exactly: F is their entropy."""
    options = transport.Options(homes=5, works=4, journeys=2000, batch_size=64)
    shares = transport.city(options).shares
    assert shares.min() > 0
    assert built("transport").best == pytest.approx(-np.sum(shares * np.log(shares)))


def test_a_stored_file_keeps_the_other_problems(tmp_path):
    one = stored.Reference(2.0, 1.0, (0.5,))
    stored.store({"first": one}, tmp_path)
    stored.store({"second": one}, tmp_path)
    read = json.loads((tmp_path / "references.json").read_text())
    assert read == {name: {"start": 2.0, "best": 1.0, "solution": [0.5]} for name in read}
    assert list(read) == ["first", "second"]


def test_check_finds_no_error():
    """The one with a coupling; what `check` would find elsewhere, the references would show."""
    report = aipod.check(*SETTINGS["dispatch"](), key=jax.random.key(0))
    assert report.ok, str(report)
    assert report.hypergradient_error < 1e-5


@pytest.mark.parametrize("name", ["portfolio", "federated-representation"])
def test_units_change_nothing_else(name):
    """A coupling with a set off the origin, and a Composite of clients."""
    old = built(name)
    new = in_units(old, 1e3, 1e-2)
    old_slope, new_slope = (
        aipod.hypergradient(e.problem, e.x0, aipod.exact_lower(e.problem, e.x0, e.y0))
        for e in (old, new)
    )
    for a, b in zip(jax.tree.leaves(old_slope), jax.tree.leaves(new_slope), strict=True):
        np.testing.assert_allclose(1e-2 / 1e3 * a, b, rtol=1e-6, atol=1e-12)
    assert new.value(new.solution) == pytest.approx(1e-2 * old.best, rel=1e-9)
    assert new.share(new.value(new.x0)) == pytest.approx(0, abs=1e-9)
    moved = jax.tree.map(lambda leaf: leaf + 1.0, old.x0)
    landed = old.problem.upper_set.project(moved)
    there = new.problem.upper_set.project(jax.tree.map(lambda leaf: 1e3 * leaf, moved))
    for a, b in zip(jax.tree.leaves(landed), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(1e3 * a, b, rtol=1e-12)


def test_units_must_be_positive():
    with pytest.raises(ValueError, match="x_unit and f_scale must be positive"):
        in_units(built("pricing"), 0.0)


def test_a_run_in_other_units_is_the_same_run():
    """With step sizes in the new unit, every iterate is the old one in that unit."""
    old = built("pricing")
    new = in_units(old, 10.0, 100.0)
    found = []
    for exhibit, lr in ((old, 0.05), (new, 0.05 * 10.0**2 / 100.0)):
        solver = aipod.AiPOD(upper_lr=lr)
        solution = aipod.solve(
            exhibit.problem, solver, exhibit.x0, exhibit.y0, 20, key=jax.random.key(0)
        )
        found.append(solution.x)
    np.testing.assert_allclose(10.0 * found[0], found[1], rtol=1e-9)


def test_value_is_that_of_a_feasible_point():
    exhibit = built("reweighting")
    off = exhibit.x0 + 0.1  # sums to 31
    assert exhibit.value(off) == pytest.approx(exhibit.value(exhibit.x0), rel=1e-9)


ROWS = [
    {"problem": "a", "solver": "aipod", "refused": "no"},
    {
        "problem": "a",
        "solver": "e3-aipod",
        "shares": [0.96, None, 0.99],
        "seconds": [3.0, 1.0, 1.5],
        "results": ["completed", "diverged", "completed"],
    },
]


def test_the_table_shows_the_median_the_worst_and_who_diverged():
    lines = benchmark.table(ROWS).splitlines()
    assert lines[0] == "| | AiPOD | E3-AiPOD |"
    assert lines[2] == "| a | refuses | 96.0 (below -999), 1.5 s, 1 diverged |"
    assert lines[3].endswith("| 0 of 0 | 1 of 1 |")
    assert lines[4].endswith("| 0 of 0 | 1 of 1 |")


@pytest.mark.parametrize(
    ("stored_in", "name", "shown"),
    [
        ("gallery", "table", benchmark.table),
        ("gallery_units", "units", checks.units_table),
        ("gallery_statement", "statement", checks.statement_table),
    ],
)
def test_the_page_shows_the_stored_table(tmp_path, stored_in, name, shown):
    stored_rows = json.loads((RESULTS / f"{stored_in}.json").read_text())
    copy = tmp_path / "gallery.md"
    copy.write_text(benchmark.PAGE.read_text())
    benchmark.into_page(stored_rows, copy, name=name, shown=shown)
    assert copy.read_text() == benchmark.PAGE.read_text()


def test_the_page_shows_the_stored_ratios(tmp_path):
    copy = tmp_path / "benchmarks.md"
    copy.write_text(divergence.PAGE.read_text())
    divergence.into_page(json.loads((RESULTS / "divergence.json").read_text()), copy)
    assert copy.read_text() == divergence.PAGE.read_text()
    assert "| t-2 | " in copy.read_text()


def test_the_tables_of_the_checks():
    units = [
        {"problem": "a", "solver": "aipod", "shares": {"x 1": 0.995, "x 1000": 1.0}},
        {"problem": "a", "solver": "e3-aipod", "shares": {"x 1": 0.9, "x 1000": 1.0}},
        {"problem": "b", "solver": "aipod", "shares": {"x 1": 1.0}},
    ]
    lines = checks.units_table(units).splitlines()
    assert lines[2] == "| a | 99.50 to 100.00 | **90.00 to 100.00** |"
    assert lines[3] == "| b | 100.00 to 100.00 |  |"
    said = [
        {"problem": "a", "solver": "aipod", "converged": word, "right": word is not False}
        for word in (True, None, False, True)
    ]
    lines = checks.statement_table(said).splitlines()
    assert lines[2] == "| a | **2 / 1 / 1, 1 wrong** |"
    assert lines[-1] == "Wrong: 1 of 4 runs."


def test_the_page_names_every_problem():
    text = benchmark.PAGE.read_text()
    for name, entry in ENTRIES.items():
        assert f"| `{name}` | {entry.world} |" in text


def test_points_that_no_lower_level_answers_are_the_worst():
    exhibit = built("ridge")
    lost = dataclasses.replace(exhibit, x0=jnp.asarray(0.0))
    assert benchmark.judged(lost, np.float32("nan")) == np.inf


def test_every_solver_gets_the_same_samples():
    """AiPOD with N = 10 draws 17 batches in an outer step, 5 of them for y; E3-AiPOD draws 27."""
    exhibit, series = built("pricing"), aipod.AiPOD(upper_lr=0.05, adjoint_steps=10)
    assert benchmark.in_budget(aipod.E3AiPOD(), 1000) == 1000
    assert benchmark.in_budget(series, 1700) == 2700
    spent = aipod.solve(
        exhibit.problem, series, exhibit.x0, exhibit.y0, 20, key=jax.random.key(0)
    ).ledger
    # Of the upper level a batch is one sample, of the lower level it is 8. The first estimate of
    # the curvature takes 7 batches more than the others.
    assert spent.upper_samples + spent.lower_samples / 8 == 20 * 17 + 7


def test_a_flat_lower_level_in_noise_is_not_called_converged():
    """|grad F| looks 0.1 % of what it was and is 10 %: y and z lag behind the wandering x."""
    exhibit = built("logistic")
    key = jax.random.key(0)
    found = aipod.solve(
        exhibit.problem, aipod.E3AiPOD(), exhibit.x0, exhibit.y0, 1000, key=key, every=1000
    )
    said = found.convergence
    assert said.stationarity < 1e-5 * said.start
    assert aipod.stationarity(exhibit.problem, found.x, exhibit.y0) > 1e-3 * said.start
    assert found.converged is None
    assert "follow x" in said.reason
