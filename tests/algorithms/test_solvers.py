"""What the algorithms are equal to, where they converge to, and what their corrections are for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod.slots import Cost, Turn
from aipod.slots._proxskip import proxskip
from aipod.slots.lower import AbstractLower
from tests.problems import CASES, orthonormal_rows, positive_definite, repeat_rows

KEY = jax.random.key(11)


@eqx.filter_jit
def _loop(problem, solver, state, steps, key):
    def body(_, state):
        return solver.traced_step(problem, state, key)

    return jax.lax.fori_loop(0, steps, body, state)


def run(problem, solver, x, y, steps, key=KEY):
    """The state after `steps` outer steps; one program serves every number of steps."""
    return _loop(problem, solver, solver.init(problem, x, y), jnp.asarray(steps), key)


def assert_close(tree, other, atol=1e-12):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_e_aipod_that_skips_nothing_is_aipod(case):
    common = {"upper_lr": 0.02, "lower_lr": 0.05, "lower_steps": 3, "adjoint_steps": 4}
    plain = aipod.AiPOD(**common)
    efficient = aipod.EAiPOD(**common, lower_prob=1.0, upper_steps=1, extrapolation=1.0)
    a = run(case.problem, plain, case.x, case.y, 4)
    b = run(case.problem, efficient, case.x, case.y, 4)
    assert_close((a.x, a.y), (b.x, b.y))


def test_proxskip_that_skips_nothing_is_projected_sgd():
    case = CASES[0]
    problem, x, y = case.problem, case.x, case.y
    rates = aipod.stepsize.Rates(jnp.zeros((), int), None)
    sgd, skip = aipod.ProjectedSGD(lr=0.1, steps=7), aipod.ProxSkip(lr=0.1, steps=7, prob=1.0)
    turn = Turn(problem, x, y, rates, KEY)
    plain, _, cost = sgd.run(turn, sgd.init(problem, x, y))
    skipped, _, other = skip.run(turn, skip.init(problem, x, y))
    assert_close(plain, skipped)
    assert int(cost.projections) == int(other.projections) == 7


def test_adjoint_proxskip_that_skips_nothing_is_projected_sgd_on_the_quadratic():
    quadratic = Quadratic(coupled=False)
    problem, n = quadratic.problem, quadratic.size
    x, y = jnp.ones(n), jnp.arange(n) / n
    adjoint = aipod.ProxSkipAdjoint(steps=9, lr=0.2, prob=1.0)
    rates = aipod.stepsize.Rates(jnp.zeros((), int), None)
    z, _, _ = adjoint.solve(Turn(problem, x, y, rates, KEY), None, None)
    slope = np.asarray(jax.grad(problem.upper, argnums=1)(x, y, None))
    projection = np.eye(n) - np.linalg.pinv(quadratic.A) @ quadratic.A
    u = np.zeros(n)
    for _ in range(9):
        u = projection @ (u - 0.2 * (slope + quadratic.G @ u))
    np.testing.assert_allclose(z, -u, atol=1e-12)


class Quadratic:
    """A deterministic quadratic over rank-deficient sets, solved exactly by linear algebra."""

    def __init__(self, *, coupled: bool, size: int = 8) -> None:
        rng = np.random.default_rng(5)
        self.size = size
        self.G = positive_definite(rng, size)
        self.D = positive_definite(rng, size)
        self.C = rng.normal(size=(size, size)) / 3
        self.target = rng.normal(size=size)
        self.A = repeat_rows(orthonormal_rows(rng, 3, size), 0)
        self.c = repeat_rows(rng.normal(size=(3, 1)), 0)[:, 0]
        self.H = repeat_rows(rng.normal(size=(3, size)) / 4, 0) if coupled else None
        self.B = repeat_rows(orthonormal_rows(rng, 2, size), 1)
        self.problem = aipod.Bilevel(
            lambda x, y, _: 0.5 * jnp.sum((y - self.target) ** 2) + 0.5 * x @ self.D @ x,
            lambda x, y, _: 0.5 * y @ self.G @ y - x @ self.C @ y,
            aipod.Affine(self.B),
            aipod.Affine(self.A, self.c, coupling=self.H),
        )

    def solution(self) -> tuple[np.ndarray, np.ndarray]:
        """(x*, y*): y*(x) is affine, so F is a quadratic on the upper set."""
        n = self.size
        zero = np.asarray(aipod.exact_lower(self.problem, jnp.zeros(n)))
        slope = np.stack(
            [np.asarray(aipod.exact_lower(self.problem, jnp.asarray(e))) - zero for e in np.eye(n)],
            axis=1,
        )
        hessian = slope.T @ slope + self.D
        gradient = slope.T @ (zero - self.target)
        rows = len(self.B)
        kkt = np.block([[hessian, self.B.T], [self.B, np.zeros((rows, rows))]])
        x = np.linalg.lstsq(kkt, np.append(-gradient, np.zeros(rows)), rcond=None)[0][:n]
        return x, zero + slope @ x


class UncorrectedSkip(AbstractLower):
    """ProxSkip with its correction thrown away: local SGD, projected now and then."""

    lr: float
    steps: int = eqx.field(static=True)
    prob: float

    def init(self, problem, x, y):
        return None

    def run(self, turn, state):
        problem, x, y, _, key = turn

        def body(y, key):
            y, _, count = proxskip(
                lambda t, _: jax.grad(problem.lower, argnums=1)(x, t, None),
                problem.lower_set.at(x),
                y,
                optax.tree.zeros_like(y),
                lr=self.lr,
                probability=self.prob,
                steps=1,
                key=key,
            )
            return y, count

        y, counts = jax.lax.scan(body, y, jax.random.split(key, self.steps))
        return y, None, Cost(jnp.sum(counts))


def gap(state, solution):
    x, y = solution
    return float(np.linalg.norm(state.x - x)), float(np.linalg.norm(state.y - y))


@pytest.mark.parametrize("coupled", [False, True], ids=["uncoupled", "coupled"])
def test_e_aipod_reaches_the_exact_solution_with_four_projections_in_five_skipped(coupled):
    quadratic = Quadratic(coupled=coupled)
    problem, n = quadratic.problem, quadratic.size
    solver = aipod.EAiPOD(
        upper_lr=0.2, lower_lr=0.4, lower_prob=0.2, lower_steps=10, adjoint_steps=80
    )
    steps = 600
    state = run(problem, solver, jnp.ones(n), jnp.zeros(n), steps)
    assert max(gap(state, quadratic.solution())) < 1e-8
    assert float(aipod.stationarity(problem, state.x)) < 1e-8
    assert int(state.counts.lower_projections) < 0.22 * steps * 10

    stalled = aipod.Alternating(UncorrectedSkip(0.4, 10, 0.2), solver.adjoint, solver.upper)
    state = run(problem, stalled, jnp.ones(n), jnp.zeros(n), steps)
    assert max(gap(state, quadratic.solution())) > 1e-2


def test_e_aipod_reaches_a_stationary_point_under_a_nonlinear_coupling():
    case = next(case for case in CASES if "coupling" in case.name)
    problem = case.problem
    solver = aipod.EAiPOD(upper_lr=0.05, lower_prob=0.2, lower_steps=20, adjoint_steps=100)
    state = run(problem, solver, case.x, case.y, 4000)
    y_star = aipod.exact_lower(problem, state.x)
    assert float(jnp.linalg.norm(state.y - y_star)) < 1e-8
    assert float(aipod.stationarity(problem, state.x)) < 1e-8

    stalled = aipod.Alternating(UncorrectedSkip(0.1, 20, 0.2), solver.adjoint, solver.upper)
    state = run(problem, stalled, case.x, case.y, 4000)
    assert float(jnp.linalg.norm(state.y - aipod.exact_lower(problem, state.x))) > 1e-3


def test_e2_aipod_lower_level_is_exact_and_its_bias_falls_with_the_adjoint_steps():
    quadratic = Quadratic(coupled=False)
    problem, n = quadratic.problem, quadratic.size
    smallest = np.linalg.eigvalsh(quadratic.G)[0]
    rho = 0.25
    # The squared error of ProxSkip shrinks by 1 - min(rho mu, q^2) per step.
    q = float(np.sqrt(rho * smallest)) + 0.1
    counts, values = np.array([10, 40, 70, 100]), []
    for N in counts:
        solver = aipod.E2AiPOD(
            upper_lr=0.2,
            lower_lr=0.4,
            lower_prob=0.2,
            lower_steps=10,
            adjoint_lr=rho,
            adjoint_prob=q,
            adjoint_steps=int(N),
        )
        states = [run(problem, solver, jnp.ones(n), jnp.zeros(n), s) for s in (600, 620, 640)]
        values.append(np.mean([float(aipod.stationarity(problem, s.x)) for s in states]))
        y_star = aipod.exact_lower(problem, states[-1].x)
        # x still moves by the noise of the coins, of the size of the bias; y follows it.
        assert float(jnp.linalg.norm(states[-1].y - y_star)) < 1e-8 + 10 * np.sqrt(values[-1])
    slope = np.polyfit(counts, np.log(values), 1)[0]
    assert slope < 0.9 * np.log(1 - rho * smallest)
    assert values[-1] < 1e-6


def test_e2_aipod_without_its_correction_stalls():
    quadratic = Quadratic(coupled=False)
    problem, n = quadratic.problem, quadratic.size

    class UncorrectedAdjoint(aipod.ProxSkipAdjoint.__base__):
        """Projects u with probability q and forgets e."""

        @property
        def rate(self):
            return None

        def solve(self, turn, upper_batch, state):
            problem, x, y, _, key = turn
            slope = jax.grad(problem.upper, argnums=1)(x, y, None)

            def body(u, key):
                hessian = jax.jvp(lambda t: jax.grad(problem.lower, 1)(x, t, None), (y,), (u,))[1]
                ahead = u - 0.25 * (slope + hessian)
                coin = jax.random.bernoulli(key, 0.3)
                return jnp.where(coin, problem.lower_set.tangent(ahead), ahead), None

            u, _ = jax.lax.scan(body, jnp.zeros(n), jax.random.split(key, 200))
            return -u, None, Cost()

    def final(adjoint):
        solver = aipod.Alternating(
            aipod.ProxSkip(lr=0.4, steps=10, prob=0.2), adjoint, aipod.Periodic(lr=0.2)
        )
        state = run(problem, solver, jnp.ones(n), jnp.zeros(n), 600)
        return float(aipod.stationarity(problem, state.x))

    assert final(aipod.ProxSkipAdjoint(steps=200, lr=0.25, prob=0.4)) < 1e-8
    assert final(UncorrectedAdjoint()) > 1e-4


def as_users_compile(function, *arguments):
    """With the fusion emitter that the suite does without.

    The noise is made in float32; without the emitter its rounding depends on how XLA vectorises.
    """
    lowered = jax.jit(function).lower(*arguments)
    return lowered.compile({"xla_cpu_use_fusion_emitters": True})


def test_seeds_run_together_under_vmap():
    from tests.problems import synthetic

    case = synthetic(n=12, noise=0.1)
    for solver in (
        aipod.EAiPOD(upper_lr=0.02, lower_lr=0.05, lower_prob=0.3, upper_steps=2),
        aipod.AiPOD(upper_lr=0.02, adjoint_random=True),
    ):

        def final(key, solver=solver):
            state = solver.init(case.problem, case.x, case.y)

            def body(state, _):
                return solver.step(case.problem, state, key=key), None

            state, _ = jax.lax.scan(body, state, None, length=20)
            return state.x, state.y, state.counts

        keys = jax.random.split(KEY, 5)
        together = as_users_compile(jax.vmap(final), keys)(keys)
        alone = as_users_compile(final, keys[0])
        one_by_one = [alone(key) for key in keys]
        assert_close(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.02), optax.sgd(0.1, momentum=0.9)], ids=["adam", "momentum"]
)
def test_any_optimiser_upstairs_keeps_the_solution_and_the_set(optimizer):
    quadratic = Quadratic(coupled=True)
    problem, n = quadratic.problem, quadratic.size
    for make in (aipod.AiPOD, aipod.EAiPOD):
        solver = make(upper_optimizer=optimizer, lower_steps=20, adjoint_steps=80)
        state = run(problem, solver, jnp.ones(n), jnp.zeros(n), 3000)
        assert max(gap(state, quadratic.solution())) < 1e-5
        assert float(jnp.max(jnp.abs(problem.upper_set.residual(state.x)))) < 1e-10


def test_extrapolation_is_server_sgd_on_the_pseudo_gradient():
    quadratic = Quadratic(coupled=True)
    problem, n = quadratic.problem, quadratic.size
    common = {"upper_lr": 0.01, "upper_steps": 3, "lower_prob": 0.5}
    a = run(problem, aipod.EAiPOD(**common, extrapolation=1.7), jnp.ones(n), jnp.zeros(n), 5)
    server = optax.sgd(1.7)
    b = run(problem, aipod.EAiPOD(**common, upper_optimizer=server), jnp.ones(n), jnp.zeros(n), 5)
    assert_close((a.x, a.y), (b.x, b.y))


def test_schedules_and_curvature_set_the_steps():
    quadratic = Quadratic(coupled=True)
    problem, n = quadratic.problem, quadratic.size
    top = float(np.linalg.eigvalsh(quadratic.G)[-1])
    scheduled = aipod.AiPOD(
        upper_lr=optax.piecewise_constant_schedule(0.1, {3: 0.5}), lower_lr=1 / top, adjoint_lr=0.1
    )
    constant = aipod.AiPOD(upper_lr=0.1, lower_lr=1 / top, adjoint_lr=0.1)
    start = jnp.ones(n), jnp.zeros(n)
    assert_close(run(problem, scheduled, *start, 3).x, run(problem, constant, *start, 3).x)
    assert float(jnp.max(jnp.abs(
        run(problem, scheduled, *start, 6).x - run(problem, constant, *start, 6).x
    ))) > 1e-4  # fmt: skip
    adaptive = aipod.AiPOD(upper_lr=0.1, lower_lr=aipod.Curvature(iterations=20))
    state = run(problem, adaptive, *start, 20)
    assert float(state.curvature.estimate) == pytest.approx(top, rel=1e-6)
    capped = aipod.stepsize.Rates(jnp.zeros((), int), jnp.asarray(0.5))
    assert float(capped(aipod.Curvature(safety=2.0, cap=3.0))) == 3.0
    assert float(capped(aipod.Curvature(safety=0.5, cap=3.0))) == 1.0


SKIPPING = aipod.EAiPOD(upper_lr=0.01, upper_steps=2, extrapolation=1.2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "solver",
    # AiPOD runs on every problem where it is compared with E-AiPOD.
    [SKIPPING, aipod.E2AiPOD(upper_lr=0.01)],
    ids=["E-AiPOD", "E2-AiPOD"],
)
def test_every_solver_makes_progress_on_every_problem(solver, case):
    if case.problem.lower_set.coupled and solver is not SKIPPING:
        with pytest.raises(ValueError, match=r"coupling.*aipod\.EAiPOD"):
            solver.init(case.problem, case.x, case.y)
        return
    problem = case.problem.expected()

    def value(x):
        batch = problem.upper_samples and problem.upper_samples(KEY)
        return float(problem.upper(x, aipod.exact_lower(problem, x, case.y), batch))

    start = case.problem.upper_set.project(case.x)
    state = run(case.problem, solver, case.x, case.y, 15)
    assert value(state.x) < value(start)
    assert int(state.step) == 15


def test_the_choices_of_the_theorems_scale_as_they_say():
    theory = aipod.stepsize.theory
    small, large = (theory(K, "thm") for K in (10_000, 1_000_000))
    assert small["upper_lr"] / large["upper_lr"] == pytest.approx(10)
    assert large["adjoint_steps"] == pytest.approx(small["adjoint_steps"] * 1.5, abs=1)
    small, large = (theory(K, "redu-LL", upper_steps=4, ratio=0.5) for K in (10_000, 1_000_000))
    assert small["lower_prob"] / large["lower_prob"] == pytest.approx(10**0.5)
    assert small["upper_lr"] == pytest.approx(1 / (4 * 100))
    assert small["lower_lr"] == pytest.approx(0.5 / 100)
    assert theory(10_000, "redu-UL", upper_steps=4)["extrapolation"] == 2.0
    small, large = (theory(K, "cor-E2") for K in (10_000, 160_000))
    assert small["adjoint_prob"] / large["adjoint_prob"] == pytest.approx(2)
    assert (small["upper_steps"], large["upper_steps"]) == (10, 20)
    with pytest.raises(ValueError, match=r"labels.*theorem 1"):
        theory(100, "theorem 1")
    makers = {"thm": aipod.AiPOD, "redu-LL": aipod.EAiPOD, "redu-UL": aipod.EAiPOD}
    for rule, make in (makers | {"cor-E2": aipod.E2AiPOD}).items():
        make(**theory(1000, rule))
