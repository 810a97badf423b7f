"""The solvers on problems with bounds at both levels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from tests.problems import positive_definite

KEY = jax.random.key(0)
ADAM = optax.adam(optax.exponential_decay(0.02, 300, 0.5), b2=0.95)


class Linear(eqx.Module):
    """1/2 y'H y - y'K x: the multipliers of the bounds are not zero."""

    hessian: jax.Array
    mixed: jax.Array

    def __call__(self, x, y, batch):
        value = 0.5 * y @ self.hessian @ y - y @ (self.mixed @ x)
        return value if batch is None else value + batch(x, y)


class Distance(eqx.Module):
    target: jax.Array
    wanted: jax.Array

    def __call__(self, x, y, batch):
        curved = jnp.sum(jnp.arange(1.0, x.size + 1) * (x - self.wanted) ** 2)
        value = jnp.sum((y - self.target) ** 2) + 0.5 * curved
        return value if batch is None else value + batch(x, y)


def bounded_problem(seed=4, lower_set=None, upper_set=None, noise=None):
    """Its stationary points lie on bounds of both sets, with multipliers that are not zero."""
    rng, n, m = np.random.default_rng(seed), 10, 6
    lower = Linear(
        jnp.asarray(positive_definite(rng, n)), jnp.asarray(0.7 * rng.normal(size=(n, m)))
    )
    upper = Distance(jnp.asarray(rng.random(n)), jnp.asarray(rng.normal(size=m)))
    samples = None if noise is None else aipod.Noise(noise)
    problem = aipod.Bilevel(
        upper,
        lower,
        aipod.Simplex() if upper_set is None else upper_set,
        aipod.Box(-0.1, 0.5) if lower_set is None else lower_set,
        samples,
        samples,
    )
    return problem, jnp.full(m, 1 / m), jnp.zeros(n)


SOLVERS = {
    "aipod": aipod.AiPOD(upper_lr=0.05, adjoint_steps=100),
    "e-aipod sgd": aipod.EAiPOD(upper_lr=0.05, lower_prob=0.2, adjoint_steps=100),
    "e-aipod adam": aipod.EAiPOD(upper_optimizer=ADAM, lower_prob=0.2, adjoint_steps=100),
    "e-aipod delta": aipod.EAiPOD(
        upper_lr=0.03, extrapolation=1.5, lower_prob=0.2, adjoint_steps=100
    ),
    "e2-aipod": aipod.E2AiPOD(upper_lr=0.05, adjoint_steps=150, adjoint_prob=0.5),
    "e3-aipod sgd": aipod.E3AiPOD(upper_lr=0.03),
    "e3-aipod adam": aipod.E3AiPOD(upper_optimizer=ADAM),
    "e3-aipod paced": aipod.E3AiPOD(),
    "exponentiated": aipod.Alternating(
        aipod.ProxSkip(prob=0.2), aipod.ConjugateGradient(), aipod.ExponentiatedGradient(0.1)
    ),
}


def solved(solver, problem, x0, y0, steps):
    return aipod.solve(problem, solver, x0, y0, steps=steps, key=KEY)


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_reach_stationary_points_on_active_bounds(name, optimised):
    problem, x0, y0 = bounded_problem()
    solution = solved(SOLVERS[name], problem, x0, y0, 10_000 if "adam" in name else 3500)
    # ||x - project(x - grad F)|| < 1e-8.
    assert aipod.stationarity(problem, solution.x, y0) < 1e-16
    y = aipod.exact_lower(problem, solution.x, y0)
    np.testing.assert_allclose(solution.y, y, atol=1e-8)
    assert np.sum((y == -0.1) | (y == 0.5)) >= 3
    assert np.sum(solution.x < 1e-12) >= 2
    assert solution.convergence.converged


class Blind(aipod.AbstractUpper):
    """Adam on the hypergradient itself, then a projection."""

    optimizer: optax.GradientTransformation

    def update(self, turn, z, implicit, batch, state):
        direction = turn.direction(implicit, batch)
        change, state = self.optimizer.update(direction, state, turn.x)
        return turn.problem.upper_set.project(turn.x + change), state, turn.upper_cost(1)


def test_adam_needs_the_gradient_mapping():
    problem, x0, y0 = bounded_problem()
    lower, adjoint = aipod.ProxSkip(prob=0.2), aipod.ConjugateGradient(rtol=1e-12)
    ends = {}
    for name, upper in (("blind", Blind(ADAM)), ("mapped", aipod.EveryStep(optimizer=ADAM))):
        solution = solved(aipod.Alternating(lower, adjoint, upper), problem, x0, y0, 7000)
        ends[name] = aipod.stationarity(problem, solution.x, y0)
    assert ends["mapped"] < 1e-16
    assert ends["blind"] > 1e-3


@pytest.mark.parametrize("slot", ["ProxSkip", "OneRound", "ProjectedSGD"])
def test_the_lower_slots_find_y_and_the_multipliers(slot):
    """ProxSkip's correction tends to the gradient at y*, whose entries off the face they are."""
    problem, x0, y0 = bounded_problem(lower_set=aipod.Simplex())
    made = {
        "ProxSkip": aipod.ProxSkip(lr=0.5, prob=0.2, steps=100),
        "OneRound": aipod.OneRound(lr=0.5, steps=5),
        "ProjectedSGD": aipod.ProjectedSGD(lr=0.5, steps=100),
    }[slot]
    solver = aipod.Alternating(made, aipod.Zero(), aipod.EveryStep(lr=1e-30))
    solution = solved(solver, problem, x0, y0, 200 if slot == "OneRound" else 10)
    y = aipod.exact_lower(problem, x0, y0)
    np.testing.assert_allclose(solution.y, y, atol=1e-10)
    gradient = jax.grad(problem.lower, argnums=1)(x0, y, None)
    state = solution.state.lower
    if slot != "ProjectedSGD":
        np.testing.assert_allclose(state.correction, gradient, atol=1e-8)
    facing = state.facing
    # On some processors the last projection lifts zeros by a rounding error.
    active = np.asarray(y) < 1e-15
    assert 3 <= np.sum(active) < 10
    np.testing.assert_array_equal(facing.active, np.where(active, -1, 0))
    multipliers = np.where(active, gradient - np.mean(gradient[~active]), 0.0)
    np.testing.assert_allclose(facing.multipliers, multipliers, atol=1e-8)
    if slot == "ProxSkip":
        assert 0.15 < solution.ledger.lower_projections / 1000 < 0.25


def marks(state):
    return np.asarray(state.lower.facing.active)


@pytest.mark.parametrize("adjoint", ["OneRoundAdjoint", "ProxSkipAdjoint"])
def test_a_warm_adjoint_follows_its_face(adjoint):
    """u has no part off the face of its step, and e none along it, whenever the face changes."""
    from aipod.slots._facing import turned

    box = aipod.Box(0.0, 1.0)
    u, e = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0])
    face = box.holding(jnp.array([-1, 0, 1]))
    new = turned(face, u, e)
    np.testing.assert_array_equal(new, [[0, 2, 0], [4, 0, 6]])
    made = {
        "OneRoundAdjoint": aipod.OneRoundAdjoint(steps=2, lr=0.3),
        "ProxSkipAdjoint": aipod.ProxSkipAdjoint(steps=4, lr=0.3, prob=0.5, warm=True),
    }[adjoint]
    problem, x0, y0 = bounded_problem()
    solver = aipod.Alternating(aipod.OneRound(lr=0.3, steps=5), made, aipod.EveryStep(lr=0.1))
    state, changes = solver.init(problem, x0, y0), 0
    for _ in range(30):
        before, state = marks(state), solver.step(problem, state, key=KEY)
        changes += np.any(before != marks(state))
        if adjoint == "OneRoundAdjoint":
            np.testing.assert_array_equal(state.adjoint.u[before != 0], 0.0)
    assert changes >= 2
    solution = solved(solver, problem, x0, y0, 1500)
    assert aipod.stationarity(problem, solution.x, y0) < 1e-16


def test_bounds_that_move_with_x():
    """y follows a cap that x moves: the hypergradient has a part that comes with the bound."""
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - 3.0) ** 2) + 0.5 * x**2,
        lambda x, y, _: 0.5 * jnp.sum((y - jnp.array([0.5, 4.0])) ** 2),
        lower_set=aipod.Box(0.0, lambda x: jnp.exp(x) * jnp.ones(2)),
    )
    # E3-AiPOD's y and u are not projected yet where it finds its hypergradient: at active bounds
    # they lag behind, and steps as long as these ran away.
    solvers = (aipod.EAiPOD(upper_lr=0.05), aipod.E3AiPOD(upper_lr=0.02), aipod.E3AiPOD())
    for solver in (aipod.AiPOD(), *solvers):
        solution = solved(solver, problem, jnp.array(1.0), jnp.zeros(2), 400)
        x = float(solution.x)
        # F(x) = 6.25 + (exp(x) - 3)^2 + x^2 / 2.
        assert abs(2 * (np.exp(x) - 3) * np.exp(x) + x) < 1e-6
        np.testing.assert_allclose(solution.y, [0.5, np.exp(x)], atol=1e-6)


@pytest.mark.parametrize(
    ("solver", "sets", "message"),
    [
        (aipod.ALSET(upper_lr=0.1), "upper", "ALSET takes no constraint on the upper level"),
        (aipod.BSA(upper_lr=0.1), "lower", "BSA takes no constraint on the lower level"),
        (aipod.TTSA(upper_lr=0.1), "lower", "TTSA takes no constraint on the lower level"),
        (aipod.IGAL(upper_lr=0.1), "lower", "lower_set has bounds, which AugmentedLagrangian does"),
        (aipod.FirstOrderPenalty(upper_lr=0.1), "lower", "which AugmentedLagrangian does not"),
        (aipod.FedNest(upper_lr=0.1), "lower", "lower_set has bounds, which SVRG does not take"),
        (aipod.FedNest(upper_lr=0.1), "upper", "upper_set has bounds, which LocalUpper does not"),
        (aipod.E2AiPOD(upper_lr=0.1, upper_steps=3), "upper", "leave for upper_steps=3 outer"),
        (
            aipod.Alternating(
                aipod.GrowingSGD(), aipod.Neumann(), aipod.ExponentiatedGradient(0.1)
            ),
            "lower",
            "which GrowingSGD does not take: use aipod.ProjectedSGD",
        ),
        (
            aipod.Alternating(aipod.ProxSkip(), aipod.Neumann(), aipod.ExponentiatedGradient(0.1)),
            "upper",
            "a Box has no exponentiated gradient step",
        ),
    ],
)
def test_what_does_not_take_bounds_says_so(solver, sets, message):
    problem, x0, y0 = bounded_problem(
        lower_set=aipod.Box(0.0, 1.0) if sets == "lower" else aipod.Free(),
        upper_set=aipod.Box(0.0, 1.0) if sets == "upper" else aipod.Free(),
    )
    with pytest.raises(ValueError, match=message):
        solver.init(problem, x0, y0)


def test_ttsa_takes_bounds_on_x():
    problem, x0, y0 = bounded_problem(lower_set=aipod.Free())
    solution = solved(aipod.TTSA(upper_lr=0.02, adjoint_steps=60), problem, x0, y0, 1500)
    assert aipod.stationarity(problem, solution.x, y0) < 1e-12


def test_several_upper_steps_stay_in_the_set_and_come_near():
    """T > 1 leaves an error that shrinks with alpha, as with equalities."""
    problem, x0, y0 = bounded_problem()
    ends = []
    for lr in (0.02, 0.002):
        solver = aipod.EAiPOD(upper_lr=lr, upper_steps=3, lower_prob=1.0, adjoint_steps=60)
        x = solved(solver, problem, x0, y0, int(8 / lr)).x
        np.testing.assert_allclose(jnp.sum(x), 1.0, atol=1e-12)
        assert jnp.all(x >= 0)
        ends.append(float(jnp.sqrt(aipod.stationarity(problem, x, y0))))
    assert ends[1] < 0.2 * ends[0]


def test_in_noise_the_face_settles_and_skipped_projections_cost_no_accuracy(optimised):
    exact, x0, y0 = bounded_problem()
    noisy, _, _ = bounded_problem(noise=0.1)
    best = solved(aipod.AiPOD(upper_lr=0.05, adjoint_steps=100), exact, x0, y0, 1500)
    x, y, steps = best.x, best.y, 1200

    def run(prob, key):
        solver = aipod.EAiPOD(upper_lr=0.02, lower_lr=0.05, lower_prob=prob, adjoint_steps=10)

        def body(state, _):
            new = solver.traced_step(noisy, state, key)
            flips = jnp.sum(new.lower.facing.active != state.lower.facing.active)
            return new, (jnp.sum((new.x - x) ** 2), flips)

        end, seen = jax.lax.scan(body, solver.init(noisy, x, y), None, length=steps)
        return *seen, end.counts.lower_projections, end.lower.facing.active

    runs = jax.jit(jax.vmap(run, (None, 0)), static_argnums=0)
    keys, errors = jax.random.split(KEY, 24), []
    for prob in (1.0, 0.1):
        error, flips, projections, active = runs(prob, keys)
        errors.append(jnp.mean(error[:, 300:]))
        assert jnp.mean(flips[:, 300:]) < 1e-3
        expected = np.where(y == 0.5, 1, np.where(y == -0.1, -1, 0))
        np.testing.assert_array_equal(active, np.broadcast_to(expected, active.shape))
        np.testing.assert_allclose(jnp.mean(projections) / (5 * steps), prob, rtol=0.03)
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.05)
