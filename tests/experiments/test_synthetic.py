"""The synthetic experiment against its closed form, and what every experiment must be."""

import dataclasses
import inspect
import tomllib
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.experiments import SUMMARIES, load, solvers, values
from aipod.experiments.base import checks, option
from aipod.experiments.compare import resolve_comparison
from aipod.experiments.config import RUN_NAMES, assignments, resolve
from aipod.experiments.execute import prepare
from aipod.experiments.tasks import synthetic
from aipod.runs._results import first

SMALL = synthetic.Options(dimension=12, lower_rank=5, upper_rank=3, problem_seed=3)


@pytest.mark.parametrize("coupled", [True, False])
def test_the_matrices_are_well_scaled_and_rank_deficient(coupled):
    options = dataclasses.replace(SMALL, coupled=coupled)
    A, H, B, c, _ = synthetic.matrices(options)
    for matrix, rank in ((A, 5), (B, 3)):
        assert len(matrix) > rank == np.linalg.matrix_rank(matrix)
        np.testing.assert_allclose(matrix[:rank] @ matrix[:rank].T, np.eye(rank), atol=1e-12)
    # No x makes the lower set empty: the range of H lies in the range of A.
    np.testing.assert_allclose(A @ np.linalg.pinv(A) @ H, H, atol=1e-12)
    assert np.any(H) == coupled
    assert 0.3 < np.linalg.norm(c) < 3


@pytest.mark.parametrize("coupled", [True, False])
def test_the_recorded_metrics_are_the_closed_form(coupled):
    options = dataclasses.replace(SMALL, coupled=coupled)
    A, H, B, c, d = synthetic.matrices(options)
    task = synthetic.build(options)
    x = task.problem.upper_set.project(jnp.asarray(np.random.default_rng(0).normal(size=12)))
    y = jnp.asarray(np.random.default_rng(1).normal(size=12))
    found = jax.tree.map(np.asarray, task.record(x, y))

    solution_map = np.eye(12) - np.linalg.pinv(A) @ A - np.linalg.pinv(A) @ H

    def objective(x):
        y = solution_map @ x
        return np.sin(c @ x + d @ y) + np.log(np.sum((x + y) ** 2) + 1)

    steps = 1e-6 * np.eye(12)
    slope = np.array([objective(x + step) - objective(x - step) for step in steps]) / 2e-6
    tangent = slope - np.linalg.pinv(B) @ B @ slope
    np.testing.assert_allclose(found["stationarity"], tangent @ tangent, rtol=1e-6)
    np.testing.assert_allclose(found["stationarity"], aipod.stationarity(task.problem, x))
    np.testing.assert_allclose(found["lower_gap"], np.sum((y - solution_map @ x) ** 2))
    np.testing.assert_allclose(found["error"], found["stationarity"] + found["lower_gap"])
    np.testing.assert_allclose(found["objective"], objective(x))


def test_the_running_error_is_the_average_so_far():
    error = np.array([4.0, 2.0, 0.0], np.float32)
    found = synthetic.running_error({"error": error})["running_error"]
    np.testing.assert_array_equal(found, [4.0, 3.0, 2.0])


def test_the_start_lies_on_the_upper_set_and_the_noise_is_as_asked():
    task = synthetic.build(dataclasses.replace(SMALL, noise=0.25))
    assert float(jnp.max(jnp.abs(task.problem.upper_set.residual(task.x0)))) < 1e-12
    noise = task.problem.lower_samples
    keys = jax.random.split(jax.random.key(0), 500)
    draws = jax.vmap(lambda key: jax.grad(noise(key), argnums=1)(task.x0, task.y0))(keys)
    assert abs(float(jnp.std(draws)) - 0.25) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimension": 1}, "dimension must be at least 2"),
        ({"lower_rank": 12}, "lower_rank must be from 1 to 11"),
        ({"upper_rank": 0}, "upper_rank must be from 1 to 11"),
        ({"noise": -0.1}, "noise must be 0 or more"),
        ({"noise": float("nan")}, "noise must be 0 or more"),
    ],
)
def test_impossible_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


# Every experiment and every solver of the command.


def test_the_table_of_arguments_is_that_of_the_solvers():
    taken = {
        name
        for entry in solvers.SOLVERS.values()
        for name in inspect.signature(getattr(aipod, entry.function)).parameters
    }
    assert set(solvers.ARGUMENTS) == taken


def test_options_are_checked_by_their_types():
    @dataclasses.dataclass(frozen=True)
    class Options:
        data: Literal["digits", "mnist"] = option("digits", "which")
        folder: str | None = option(None, "where")
        clients: int = option(50, "how many")

    found = checks(Options)
    assert found["data"]("mnist", "data") == "mnist"
    assert found["folder"]("here", "folder") == "here"
    assert found["clients"]("7", "clients") == 7
    with pytest.raises(ValueError, match=r"one of digits, mnist, got .* mean digits"):
        found["data"]("digit", "data")


def test_the_first_step_and_round_of_each_accuracy():
    accuracy = np.array([0.5, 0.81, 0.79, 0.93])
    steps = np.array([10, 20, 30, 40])
    found = first({"accuracy": accuracy, "step": steps, "rounds": 3 * steps})
    assert list(found) == ["0.80", "0.85", "0.90", "0.92", "0.94", "0.96"]
    assert found["0.80"] == {"step": 20, "rounds": 60}
    assert found["0.92"] == {"step": 40, "rounds": 120}
    assert found["0.94"] is None


@pytest.mark.parametrize("experiment", SUMMARIES)
def test_an_experiment_is_complete(experiment):
    found = load(experiment)
    assert found.name == experiment
    names = set(checks(found.options))
    assert all(field.metadata["help"] for field in dataclasses.fields(found.options))
    # One flat file of names: none may mean two things.
    assert not names & {*RUN_NAMES, "seeds", "solvers", "panel"}
    assert not names & set(solvers.ARGUMENTS)
    assert not set(solvers.ARGUMENTS) & set(RUN_NAMES)
    for solver, arguments in found.arguments.items():
        assert set(arguments) <= set(solvers.defaults(solver))
    for panel in found.panels(found.options()):
        assert len(panel.variants) > 1


# What a solver of the command accepts where it does not accept everything.
FREE = ("alset", "bsa", "stocbio", "soba", "simfbo", "fedmbo", "fed-f2sa", "fedbioacc")
ACCEPTED = {name: {"constraints": "none"} for name in FREE} | {
    "ttsa": {"constraints": "upper"},
    "ig-al": {"constraints": "lower", "noise": 0},
    "first-order-penalty": {"noise": 0},
}


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_a_configuration_file_repeats_its_run(solver):
    given = {"experiment": "synthetic", "solver": solver, "coupled": False, "steps": 7}
    given |= ACCEPTED.get(solver, {})
    config = resolve(given | {"lower_lr": "curvature(0.5)", "upper_optimizer": "adam(0.003)"})
    assert resolve(tomllib.loads(config.toml())) == config
    assert prepare(config).solver.lower.lr == aipod.Curvature(0.5)


def test_a_comparison_file_repeats_its_comparison():
    config = resolve_comparison({"experiment": "synthetic", "lower_steps": 3, "seeds": 2})
    assert resolve_comparison(tomllib.loads(config.toml())) == config
    own = resolve_comparison({"experiment": "synthetic", "solvers": "aipod,e-aipod:lower_prob=1"})
    assert resolve_comparison(tomllib.loads(own.toml())) == own
    assert list(own.runs) == ["aipod", "e-aipod:lower_prob=1"]
    assert all(run.arguments["lower_steps"] == 3 for run in config.runs.values())
    # p = 0.3 with T = 1 stands in both panels, and is run once.
    assert ["e-aipod:lower_prob=0.3", "e-aipod:upper_steps=1"] in config.folders().values()


def test_uncoupled_comparisons_include_the_solver_that_needs_it():
    coupled, uncoupled = (
        resolve_comparison({"experiment": "synthetic", "coupled": value}) for value in (True, False)
    )
    assert "e2-aipod" not in coupled.runs
    assert "e2-aipod" in uncoupled.runs


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1", 1), ("a=0.5", 0.5), ("a=true", True), ("a=adam(0.1)", "adam(0.1)"), ("a-b=x", "x")],
)
def test_assignments(text, value):
    assert list(assignments([text]).values()) == [value]


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (values.whole, "5", 5),
        (values.whole, 5.0, 5),
        (values.number, "1e-3", 1e-3),
        (values.flag, "no", False),
        (values.step_size, "0.1", 0.1),
        (values.step_size, "curvature", "curvature"),
        (values.optimizer, "sgd(0.1, momentum=0.9)", "sgd(0.1, momentum=0.9)"),
    ],
)
def test_plain_values(check, value, expected):
    found = check(value, "name")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (values.whole, "2.5"),
        (values.whole, "nan"),
        (values.whole, True),
        (values.number, "much"),
        (values.flag, "perhaps"),
        (values.step_size, "curvature("),
        (values.step_size, "curvature(safety=1, other=2)"),
        (values.step_size, "__import__('os').getcwd()"),
        (values.optimizer, "adam"),
        (values.optimizer, "open('file')"),
        (values.optimizer, "adam(open('file'))"),
        (values.optimizer, "optax.adam(0.1)"),
    ],
)
def test_values_that_are_none(check, value):
    with pytest.raises(ValueError, match="name must be"):
        check(value, "name")


def test_numbers_do_not_compile_anew():
    """Step sizes and probabilities are arrays: one compiled program serves every value."""
    made = [solvers.make("e-aipod", {"upper_lr": p, "lower_prob": p}) for p in (0.1, 1.0)]
    first, second = (eqx.partition(solver, eqx.is_array)[1] for solver in made)
    assert eqx.tree_equal(first, second)
