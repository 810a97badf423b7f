"""The loop around the solvers: what it records, when it stops, and what survives a crash."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod.solving import CheckpointError
from tests.problems import synthetic, synthetic_matrices

# Bits are compared here, so programs must be those that users get.
pytestmark = pytest.mark.usefixtures("optimised")

KEY = jax.random.key(2)
CASE = synthetic(n=8, noise=0.1)
SOLVER = aipod.EAiPOD(upper_lr=0.02, lower_lr=0.05, lower_prob=0.4, adjoint_lr=1.0, adjoint_steps=2)


def norms(x, y):
    return {"size": jnp.sum(x**2), "entry": y[0]}


def solve(steps=60, *, case=CASE, solver=SOLVER, key=KEY, record=norms, **options):
    return aipod.solve(
        case.problem, solver, case.x, case.y, steps, key=key, record=record, **options
    )


def assert_same_run(a, b):
    """Bit for bit: state, history and ledger."""
    for left, right in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(left, right)
    assert list(a.history) == list(b.history)
    for name in a.history:
        np.testing.assert_array_equal(a.history[name], b.history[name])
    assert a.ledger == b.ledger


def test_history_and_ledger_tell_what_the_bare_steps_did():
    solution = solve(25, every=10)
    state = SOLVER.init(CASE.problem, CASE.x, CASE.y)
    rows = []
    for k in range(1, 26):
        state = SOLVER.step(CASE.problem, state, key=KEY)
        if k in (10, 20, 25):
            rows.append((k, int(state.counts.lower_projections), float(state.y[0])))
    history = solution.history
    np.testing.assert_array_equal(history["step"], [10, 20, 25])
    np.testing.assert_array_equal(history["lower_projections"], [row[1] for row in rows])
    np.testing.assert_allclose(history["entry"], [row[2] for row in rows], rtol=1e-12)
    np.testing.assert_allclose(solution.x, state.x, rtol=1e-12)
    assert solution.result is aipod.Result.completed
    ledger = solution.ledger
    # S = 5 lower samples, N - 1 = 1 in the series and one for the implicit term in each step
    assert (ledger.upper_samples, ledger.lower_samples) == (25, 25 * 7)
    assert (ledger.upper_projections, ledger.adjoint_projections) == (25, 50)
    assert ledger.samples == history["samples"][-1]
    assert solution.history.to_frame().shape == (3, 9)
    assert len(solution.seconds) == 3


def test_chunks_and_recording_never_change_a_trajectory(monkeypatch):
    reference = solve(60, every=60)
    for every, seconds in ((1, 0.5), (7, 1e-9), (60, 1e-9)):
        monkeypatch.setattr("aipod.solving._run._CHUNK_SECONDS", seconds)
        other = solve(60, every=every)
        np.testing.assert_array_equal(other.x, reference.x)
        np.testing.assert_array_equal(other.y, reference.y)
        assert other.ledger == reference.ledger


def test_more_rows_than_one_chunk_holds(monkeypatch):
    monkeypatch.setattr("aipod.solving._chunk.ROWS", 4)
    solution = solve(30, every=1)
    np.testing.assert_array_equal(solution.history["step"], np.arange(1, 31))


def test_stopping():
    by_steps = solve(None, stop=aipod.Stop(steps=12), every=5)
    assert by_steps.history["step"].tolist() == [5, 10, 12]
    by_projections = solve(1000, stop=aipod.Stop(projections=50), every=10)
    assert by_projections.result is aipod.Result.out_of_projections
    assert 50 <= by_projections.ledger.projections < 60
    assert by_projections.history["step"][-1] == int(by_projections.state.step)
    full = solve(1000, every=10)
    level = float(np.quantile(full.history["size"], 0.4))
    first = int(np.argmax(full.history["size"] <= level))
    by_metric = solve(1000, every=10, stop=aipod.Stop(tolerance={"size": level}))
    assert by_metric.result is aipod.Result.converged
    assert by_metric.history["step"][-1] == full.history["step"][first]
    by_time = solve(2**31 - 1, every=10_000, stop=aipod.Stop(seconds=0.2))
    assert by_time.result is aipod.Result.out_of_time


def test_divergence_keeps_the_last_finite_state(tmp_path):
    wild = aipod.EAiPOD(upper_lr=0.02, lower_lr=30.0, adjoint_lr=1.0)
    solution = solve(10_000, solver=wild, checkpoint=tmp_path, throw=False, every=1000)
    assert solution.result is aipod.Result.diverged
    last = int(solution.state.step)
    assert 0 < last < 10_000
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((solution.x, solution.y)))
    after = wild.step(CASE.problem, solution.state, key=KEY)
    assert not np.all(np.isfinite(jnp.concatenate([after.x, after.y, after.lower.correction])))
    for word in (f"outer step {last + 1}", "lower_lr=15", "Curvature"):
        assert word in solution.message
    assert solution.history["step"][-1] == last
    assert list(tmp_path.glob(f"step-{last:012d}.npz"))
    with pytest.raises(aipod.DivergedError, match="lower_lr=15") as caught:
        solve(10_000, solver=wild)
    assert caught.value.solution.result is aipod.Result.diverged


@pytest.mark.parametrize("every", [1, 7, 5_000])
@pytest.mark.parametrize("growth", [1.5, 1e3, 1e90])
def test_a_diverged_run_ends_as_if_it_had_been_asked_to_end_there(growth, every):
    # One lower step multiplies y by -growth, so that numbers last for 1,750 steps, 102, or three.
    solver = aipod.AiPOD(
        upper_lr=0.1, lower_lr=1 + growth, lower_steps=1, adjoint_lr=0.5, adjoint_steps=1
    )
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x**2), lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2)
    )
    case = CASE._replace(problem=problem, x=jnp.zeros(1), y=jnp.ones(1))
    options = {"case": case, "solver": solver, "every": every, "throw": False}
    found = solve(4_000, **options)
    assert found.result is aipod.Result.diverged
    last = int(np.log(np.finfo(float).max) / np.log(growth))
    assert int(found.state.step) == last
    assert_same_run(found, solve(last, **options))


def test_resuming_changes_nothing(tmp_path):
    whole = solve(90, every=7)
    solve(40, every=7, checkpoint=tmp_path)
    resumed = solve(90, every=7, checkpoint=tmp_path, resume=True)
    # The first part ended at step 40 and recorded it; the rest must agree bit for bit.
    for left, right in zip(
        jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    kept = resumed.history["step"] != 40
    for name in whole.history:
        np.testing.assert_array_equal(whole.history[name], resumed.history[name][kept])
    again = solve(90, every=7, checkpoint=tmp_path, resume=True)
    assert_same_run(again, resumed)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    solve(5, checkpoint=tmp_path)
    other_solver = aipod.EAiPOD(upper_lr=0.03, lower_lr=0.05, lower_prob=0.4, adjoint_lr=1.0)
    cases = {
        "problem or solver": {"solver": other_solver},
        "key": {"key": jax.random.key(3)},
        "starting point": {"case": CASE._replace(x=2 * CASE.x)},
        "data": {"case": synthetic(n=8, seed=1, noise=0.1)},
    }
    for part, changed in cases.items():
        with pytest.raises(CheckpointError, match=f"another run: another .*{part}.*start anew"):
            solve(5, checkpoint=tmp_path, resume=True, **changed)
    with pytest.raises(CheckpointError, match=r"already holds.*resume=True"):
        solve(5, checkpoint=tmp_path)
    # Recording something else is not another run.
    solve(6, checkpoint=tmp_path, resume=True, every=2)


@pytest.mark.parametrize("damage", ["half", "empty", "zeroed end"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    whole = solve(40, every=10)
    solve(10, every=10, checkpoint=tmp_path)
    solve(20, every=10, checkpoint=tmp_path, resume=True)
    newest = max(tmp_path.glob("*.npz"))
    content = newest.read_bytes()
    newest.write_bytes(
        {
            "half": content[: len(content) // 2],
            "empty": b"",
            "zeroed end": content[:-30] + bytes(30),
        }[damage]
    )
    assert_same_run(solve(40, every=10, checkpoint=tmp_path, resume=True), whole)


def test_only_the_last_two_checkpoints_stay(tmp_path):
    for steps in (10, 20, 30, 40):
        solve(steps, checkpoint=tmp_path, resume=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000000030.npz", "step-000000000040.npz"]


CRASHING = """
import sys, jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import aipod
from tests.solving.test_solve import CASE, SOLVER, norms
folder, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
solution = aipod.solve(
    CASE.problem, SOLVER, CASE.x, CASE.y, steps, key=jax.random.key(2), record=norms, every=500,
    checkpoint=folder, checkpoint_seconds=0.02, resume=True,
)
np.savez(out, x=solution.x, y=solution.y, r=solution.state.lower.correction, **solution.history)
"""


@pytest.mark.slow
def test_kill_minus_nine_at_any_moment_then_resume(tmp_path):
    """A real process, killed several times; slow because each start imports everything anew."""
    steps = 60_000
    root = Path(__file__).parents[2]
    # The first process compiles, the others find its programs.
    shared = {
        "PYTHONPATH": str(root),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(folder, out):
        command = [sys.executable, "-c", CRASHING, str(folder), str(steps), str(out)]
        return subprocess.Popen(command, cwd=root, env=os.environ | shared)

    def newest(folder):
        files = sorted(folder.glob("step-*.npz"))
        return int(files[-1].stem.removeprefix("step-")) if files else 0

    assert start(tmp_path / "whole", tmp_path / "whole.npz").wait(300) == 0
    folder, kills = tmp_path / "killed", 0
    folder.mkdir()
    for fraction in (0.1, 0.35, 0.6):
        process = start(folder, tmp_path / "killed.npz")
        deadline = time.monotonic() + 200
        while newest(folder) < fraction * steps and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.003)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 2
    assert 0 < newest(folder) < steps
    assert start(folder, tmp_path / "killed.npz").wait(300) == 0
    whole, killed = np.load(tmp_path / "whole.npz"), np.load(tmp_path / "killed.npz")
    assert set(whole.files) == set(killed.files)
    for name in whole.files:
        np.testing.assert_array_equal(whole[name], killed[name])


def test_interrupting_keeps_what_was_done(tmp_path):
    reports = []

    def impatient(report):
        reports.append(report)
        if report.step >= 20:
            raise KeyboardInterrupt

    solution = solve(100_000, every=10, progress=impatient, checkpoint=tmp_path)
    assert solution.result is aipod.Result.interrupted
    assert 20 <= int(solution.state.step) < 100_000
    assert reports[-1].step == int(solution.state.step)
    assert {"size", "entry"} <= set(reports[-1].metrics) or not reports[-1].metrics
    assert list(tmp_path.glob("*.npz"))


def test_progress_reports(capsys):
    reports = []
    solve(50, every=10, progress=reports.append)
    assert reports[-1].done
    assert reports[-1].metrics["step"] == 50
    assert "steps/s" in reports[-1].describe()
    solve(20, progress=True)  # no terminal here: nothing may be printed
    assert capsys.readouterr().err == ""


def test_captured_arrays_are_arguments_of_the_program():
    """A 3 MB array in a user's closure must not become a constant of the compiled program."""
    from aipod.solving._mesh import Placement
    from aipod.solving._programs import Program
    from aipod.solving._run import Run

    big = jnp.asarray(np.random.default_rng(0).normal(size=(50_000, 8)))
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.mean((big @ y - 1) ** 2) + jnp.sum(x**2),
        lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    )
    solver = aipod.AiPOD(upper_lr=0.1)
    state = solver.init(problem, jnp.ones(8), jnp.ones(8))
    run = Run(problem, solver, Placement(problem, None), state, KEY, None, 10, 10, aipod.Stop())
    arrays, static = eqx.partition((problem, solver, None, None), eqx.is_array)
    program = Program(static, (arrays, state, KEY, run._limits(10)))
    assert any(leaf.shape == big.shape for leaf in program.captured)
    assert len(program.compiled.as_text()) < 2e6


def test_the_synthetic_claim_same_error_with_a_tenth_of_the_projections():
    """Figure 1: p = 0.1 follows p = 1. Margins: 5 % in the error, 11 % of the projections."""
    n, steps = 100, 400
    case = synthetic(n=n, noise=0.1)
    data = synthetic_matrices(n)
    pinv = np.linalg.pinv(data.A)
    solution_map = jnp.asarray(np.eye(n) - pinv @ data.A - pinv @ data.H)
    projector = jnp.asarray(np.eye(n) - np.linalg.pinv(data.B) @ data.B)
    clean = case.problem.expected()

    def value(x):
        y = solution_map @ x
        return clean.upper(x, y, clean.upper_samples(KEY))

    def errors(prob, key):
        solver = aipod.EAiPOD(
            upper_lr=0.02,
            lower_lr=0.01,
            lower_steps=5,
            lower_prob=prob,
            adjoint_lr=1.0,
            adjoint_steps=1,
        )
        start = 5 * jax.random.normal(jax.random.key(9), (2, n))
        state = solver.init(case.problem, start[0], start[1])

        def body(state, _):
            new = solver.traced_step(case.problem, state, key)
            slope = projector @ jax.grad(value)(new.x)
            gap = new.y - solution_map @ new.x
            return new, jnp.sum(slope**2) + jnp.sum(gap**2)

        state, history = jax.lax.scan(body, state, None, length=steps)
        return jnp.mean(history), state.counts.lower_projections

    keys = jax.random.split(KEY, 5)
    always = jax.jit(jax.vmap(lambda key: errors(1.0, key)))(keys)
    seldom = jax.jit(jax.vmap(lambda key: errors(0.1, key)))(keys)
    ratio = np.mean(seldom[0]) / np.mean(always[0])
    assert abs(ratio - 1) < 0.05
    assert np.sum(seldom[1]) <= 0.11 * np.sum(always[1])


BAD = {
    "no key type": (lambda: solve(5, key=0), "key must be one JAX key"),
    "no steps": (lambda: solve(None), "steps=1000"),
    "zero steps": (lambda: solve(0), "steps must be a whole number"),
    "every": (lambda: solve(5, every=0), "every must be"),
    "record": (lambda: solve(5, record="loss"), "record must be a function"),
    "record nested": (lambda: solve(5, record=lambda x, y: {"a": {"b": 1, "c": 2}}), "dictionary"),
    "record clash": (lambda: solve(5, record=lambda x, y: {"step": x[0]}), "itself records"),
    "tolerance name": (
        lambda: solve(5, stop=aipod.Stop(tolerance={"los": 1.0})),
        "names.*los.*only.*size",
    ),
    "tolerance kind": (lambda: aipod.Stop(tolerance=0.1), "names the metric"),
    "stop": (lambda: aipod.Stop(seconds=-1), "seconds must be positive"),
    "resume": (lambda: solve(5, resume=True), "needs checkpoint"),
    "solver": (lambda: solve(5, solver=optax.sgd(0.1)), "solver must be"),
    "probability": (lambda: aipod.EAiPOD(upper_lr=0.1, lower_prob=0.0), r"lower_prob.*\(0, 1\]"),
    "adjoint probability": (lambda: aipod.E2AiPOD(upper_lr=0.1, adjoint_prob=1.5), "adjoint_prob"),
    "step size": (lambda: aipod.AiPOD(upper_lr=-0.1), "upper_lr must be positive"),
    "lower step size": (lambda: aipod.AiPOD(upper_lr=0.1, lower_lr=0.0), "lower_lr must be"),
    "step size type": (lambda: aipod.AiPOD(upper_lr="fast"), "upper_lr must be a number"),
    "nan step": (lambda: aipod.AiPOD(upper_lr=float("nan")), "upper_lr must be positive"),
    "no upper step": (lambda: aipod.EveryStep(), "either upper_lr or upper_optimizer"),
    "two upper steps": (
        lambda: aipod.AiPOD(upper_lr=0.1, upper_optimizer=optax.sgd(0.1)),
        "one of the two",
    ),
    "curvature upstairs": (lambda: aipod.AiPOD(upper_lr=aipod.Curvature()), "measures the lower"),
    "lower steps": (lambda: aipod.AiPOD(upper_lr=0.1, lower_steps=0), "lower_steps.*at least 1"),
    "upper steps": (lambda: aipod.EAiPOD(upper_lr=0.1, upper_steps=1.5), "upper_steps.*whole"),
    "adjoint steps": (lambda: aipod.EAiPOD(upper_lr=0.1, adjoint_steps=0), "adjoint_steps"),
    "delta": (lambda: aipod.EAiPOD(upper_lr=0.1, extrapolation=0.5), "extrapolation.*at least 1"),
    "optimiser with delta": (
        lambda: aipod.EAiPOD(upper_optimizer=optax.sgd(1.0), extrapolation=2.0),
        "give one of the two",
    ),
    "optimiser with T": (
        lambda: aipod.EAiPOD(upper_optimizer=optax.sgd(1.0), upper_steps=3),
        "also needs upper_lr",
    ),
    "periodic optimiser": (
        lambda: aipod.E2AiPOD(upper_optimizer=optax.sgd(1.0), upper_steps=3),
        "upper_steps=1",
    ),
    "coupling": (
        lambda: solve(5, solver=aipod.E2AiPOD(upper_lr=0.1)),
        "coupling.*aipod.EAiPOD",
    ),
    "slot": (
        lambda: aipod.Alternating(aipod.Neumann(), aipod.Neumann(), aipod.EveryStep(lr=0.1)),
        "lower must be a slot",
    ),
    "shape": (lambda: solve(5, case=CASE._replace(y=jnp.zeros(5))), "5 entries.*8 columns"),
    "nan start": (
        lambda: solve(5, case=CASE._replace(x=CASE.x.at[0].set(jnp.nan))),
        "x0 holds NaN",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_sentence(name):
    act, pattern = BAD[name]
    with pytest.raises(ValueError, match=pattern):
        act()


def test_counts_beyond_32_bits():
    """4 million examples a batch: 2^31 samples are passed after a hundred outer steps."""

    class Huge(aipod.AbstractSampler):
        size: int = 4_000_000

        def __call__(self, key):
            return None

    case = synthetic()
    problem = dataclasses.replace(case.problem, upper_samples=Huge(), lower_samples=Huge())
    solution = aipod.solve(problem, SOLVER, case.x, case.y, 2_000, key=KEY, every=400)
    per_step = solve(1).ledger
    assert solution.ledger.lower_samples == 2_000 * per_step.lower_samples * 4_000_000
    assert solution.ledger.upper_samples == 2_000 * per_step.upper_samples * 4_000_000
    assert (np.diff(solution.history["lower_samples"]) > 0).all()
    assert solution.history["lower_samples"][-1] == solution.ledger.lower_samples


def test_a_coupling_that_leaves_the_range_of_A_is_told():
    """Two equal rows of A, and an h that differs between them as soon as x moves."""
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((x - 1.0) ** 2) + jnp.sum(y**2),
        lambda x, y, _: 0.5 * jnp.sum((y - 1.0) ** 2),
        lower_set=aipod.Affine(
            jnp.ones((2, 3)), 1.0, coupling=lambda x: jnp.array([0.0, 1.0]) * x[0]
        ),
    )
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.5)
    solution = aipod.solve(problem, solver, jnp.zeros(1), jnp.zeros(3), 20, key=KEY)
    assert solution.result is aipod.Result.infeasible
    assert not solution.result.ok
    assert "Make c - h(x) lie in the range of A" in solution.message
    with pytest.raises(ValueError, match="lower_set at the given x is empty"):
        solution.feasible()
    same = dataclasses.replace(
        problem,
        lower_set=aipod.Affine(jnp.ones((2, 3)), 1.0, coupling=lambda x: jnp.ones(2) * x[0]),
    )
    sound = aipod.solve(same, solver, jnp.zeros(1), jnp.zeros(3), 20, key=KEY)
    assert sound.result is aipod.Result.completed
    assert float(jnp.abs(jnp.sum(sound.feasible()[1]) + sound.x[0] - 1)) < 1e-10
