"""The other methods of Table 1: each against its own update written out in NumPy.

One problem serves them all, with random Hessians whose noise can be turned off without compiling
anew: f = 1/2 ||y - t||^2 + 1/2 ||x||^2 + xi'(x, y), g = 1/2 y'(G + H)y + x'(C + D)y + phi'y.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod._misc.keys import subkey, subkeys
from tests import problems
from tests.slots.test_paper import KEY, Draws

SIZE = 5
_RNG = np.random.default_rng(11)
G = problems.positive_definite(_RNG, SIZE, low=1.0, high=1.5)
C = _RNG.standard_normal((SIZE, SIZE)) / 2
TARGET = _RNG.standard_normal(SIZE)
# Singular values far apart, so that power iterations find ||A|| to the last digit.
A = np.diag([2.0, 1.0]) @ problems.orthonormal_rows(_RNG, 2, SIZE)
LEVEL = _RNG.standard_normal(2)
B = problems.repeat_rows(_RNG.standard_normal((1, SIZE)), 0)
BOUND = np.array([0.5, 0.5])
X0, Y0 = np.linalg.pinv(B) @ BOUND, np.ones(SIZE)


def upper(x, y, xi):
    noise = 0.0 if xi is None else xi[0] @ x + xi[1] @ y
    return 0.5 * jnp.sum((y - TARGET) ** 2) + 0.5 * jnp.sum(x**2) + noise


def lower(x, y, phi):
    hessian, cross, noise = (0.0, 0.0, jnp.zeros(SIZE)) if phi is None else phi
    return 0.5 * y @ (G + hessian) @ y + x @ (C + cross) @ y + noise @ y


class UpperSamples(eqx.Module):
    scale: jax.Array

    def __call__(self, key):
        return self.scale * jax.random.normal(key, (2, SIZE))


class LowerSamples(eqx.Module):
    scale: jax.Array

    def __call__(self, key):
        first, second, third = jax.random.split(key, 3)
        root = self.scale * jax.random.normal(first, (SIZE, SIZE))
        cross = self.scale * jax.random.normal(second, (SIZE, SIZE))
        return root + root.T, cross, self.scale * jax.random.normal(third, (SIZE,))


def problem(*, noise=None, upper_set=None, lower_set=None):
    free = aipod.Free()
    samples = (None, None)
    if noise is not None:
        samples = UpperSamples(jnp.asarray(noise)), LowerSamples(jnp.asarray(noise))
    return aipod.Bilevel(upper, lower, upper_set or free, lower_set or free, *samples)


ON_X, ON_Y = aipod.Affine(B, BOUND), aipod.Affine(A, LEVEL)


def solution(*, on_x: bool, on_y: bool) -> np.ndarray:
    """x* by linear algebra: y*(x) = M x + m, F is quadratic."""
    rows = A if on_y else np.zeros((0, SIZE))
    level = LEVEL if on_y else np.zeros(0)
    block = np.block([[G, rows.T], [rows, np.zeros((len(rows), len(rows)))]])
    inverse = np.linalg.inv(block)
    M, m = -inverse[:SIZE, :SIZE] @ C.T, inverse[:SIZE, SIZE:] @ level
    hessian, slope = np.eye(SIZE) + M.T @ M, M.T @ (m - TARGET)
    rows, bound = (B[:1], BOUND[:1]) if on_x else (np.zeros((0, SIZE)), np.zeros(0))
    block = np.block([[hessian, rows.T], [rows, np.zeros((len(rows), len(rows)))]])
    return np.linalg.solve(block, np.concatenate([-slope, bound]))[:SIZE]


def g_y(x, y, phi):
    return (G + phi[0]) @ y + (C + phi[1]).T @ x + phi[2]


def f_y(y, xi):
    return y - TARGET + xi[1]


def follow(solver, case, step, steps=3):
    """`steps` steps of the solver beside `step(draws, k, x, y)`, then on to the solution."""
    state = solver.init(case, jnp.asarray(X0), jnp.asarray(Y0))
    x, y = np.asarray(state.x), Y0
    for k in range(steps):
        x, y = step(Draws(case, k), k, x, y)
        state = solver.step(case, state, key=KEY)
        np.testing.assert_allclose(state.x, x, atol=1e-11)
        np.testing.assert_allclose(state.y, y, atol=1e-11)
    return state


def settle(solver, case, state, steps=400):
    """The same compiled step without noise, far along."""
    quiet = eqx.tree_at(
        lambda p: (p.upper_samples.scale, p.lower_samples.scale), case, (jnp.zeros(()),) * 2
    )
    for _ in range(steps):
        state = solver.step(quiet, state, key=KEY)
    return state


ALPHA, BETA, ETA, TERMS = 0.15, 0.3, 0.6, 12


def neumann(draws, v, mean=lambda samples, key: samples(key)):
    z = ETA * v
    for n in range(1, TERMS):
        phi = mean(draws.lower, subkey(draws.adjoint_key, n))
        v = v - ETA * (G + phi[0]) @ v
        z = z + ETA * v
    return z


def implicit_step(draws, x, y, project=lambda x: x):
    z = neumann(draws, f_y(y, draws.xi))
    return project(x - ALPHA * (x + draws.xi[0] - (C + draws.phi[1]) @ z))


def test_alset_is_aipod_without_constraints():
    arguments = {"upper_lr": ALPHA, "lower_lr": BETA, "lower_steps": 3}
    arguments |= {"adjoint_steps": TERMS, "adjoint_lr": ETA}
    case = problem(noise=0.05)
    solver = aipod.ALSET(**arguments)

    def step(draws, k, x, y):
        for key in draws.loop(draws.lower_key, 3, 1.0)[1]:
            y = y - BETA * g_y(x, y, draws.lower(key))
        return implicit_step(draws, x, y), y

    state = follow(solver, case, step)
    same = aipod.AiPOD(**arguments)
    other = same.init(case, jnp.asarray(X0), jnp.asarray(Y0))
    for _ in range(3):
        other = same.step(case, other, key=KEY)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)
    end = settle(solver, case, state)
    np.testing.assert_allclose(end.x, solution(on_x=False, on_y=False), atol=1e-4)


def test_bsa_makes_more_and_shorter_steps():
    case = problem(noise=0.05)
    solver = aipod.BSA(
        upper_lr=ALPHA, lower_lr=BETA, growth=1.3, decay=0.1, adjoint_steps=TERMS, adjoint_lr=ETA
    )

    def step(draws, k, x, y):
        for t in range(int(np.ceil(1.3 * np.sqrt(k + 1)))):
            phi = draws.lower(subkey(draws.lower_key, t))
            y = y - BETA / (1 + 0.1 * t) * g_y(x, y, phi)
        return implicit_step(draws, x, y), y

    state = follow(solver, case, step)
    # 2 + 2 + 3 steps on y; 12 - 1 Neumann factors and one sample of w in each outer step.
    assert int(state.counts.lower_samples) == 7 + 3 * 12
    end = settle(solver, case, state)
    np.testing.assert_allclose(end.x, solution(on_x=False, on_y=False), atol=1e-4)


def test_stocbio_averages_its_batches():
    case = problem(noise=0.05)
    solver = aipod.StocBiO(
        upper_lr=ALPHA,
        lower_lr=BETA,
        lower_steps=2,
        batch=3,
        adjoint_steps=TERMS,
        adjoint_lr=ETA,
    )

    def mean(samples, key):
        many = [samples(one) for one in subkeys(key, 3)]
        return jax.tree.map(lambda *parts: np.mean(parts, axis=0), *many)

    def step(draws, k, x, y):
        xi_key, phi_key = subkeys(jax.random.fold_in(KEY, k), 6)[3:5]
        for key in draws.loop(draws.lower_key, 2, 1.0)[1]:
            y = y - BETA * g_y(x, y, mean(draws.lower, key))
        xi, phi = mean(draws.upper, xi_key), mean(draws.lower, phi_key)
        z = neumann(draws, f_y(y, xi), mean)
        return x - ALPHA * (x + xi[0] - (C + phi[1]) @ z), y

    state = follow(solver, case, step)
    assert int(state.counts.upper_samples) == 3 * 3
    assert int(state.counts.lower_samples) == 3 * 3 * (2 + 11 + 1)
    end = settle(solver, case, state)
    np.testing.assert_allclose(end.x, solution(on_x=False, on_y=False), atol=1e-4)


def test_ttsa_projects_x_and_stays_in_its_set():
    case = problem(noise=0.05, upper_set=ON_X)
    solver = aipod.TTSA(upper_lr=ALPHA, lower_lr=BETA, adjoint_steps=TERMS, adjoint_lr=ETA)
    pinv = np.linalg.pinv(B)

    def step(draws, k, x, y):
        (key,) = draws.loop(draws.lower_key, 1, 1.0)[1]
        y = y - BETA * g_y(x, y, draws.lower(key))
        return implicit_step(draws, x, y, lambda x: x - pinv @ (B @ x - BOUND)), y

    state = follow(solver, case, step)
    for _ in range(200):
        state = solver.step(case, state, key=KEY)
        assert np.max(np.abs(B @ np.asarray(state.x) - BOUND)) < 1e-10
    end = settle(solver, case, state)
    np.testing.assert_allclose(end.x, solution(on_x=True, on_y=False), atol=1e-4)


def test_soba_moves_all_three_from_the_same_point():
    case = problem(noise=0.05)
    solver = aipod.SOBA(upper_lr=ALPHA, lower_lr=BETA, adjoint_lr=ETA)
    kept = {"y": Y0, "z": np.zeros(SIZE)}

    def step(draws, k, x, y):
        y, z = kept["y"], kept["z"]
        upper_key, lower_key = subkeys(draws.adjoint_key, 2)
        hessian = G + draws.lower(lower_key)[0]
        kept["y"] = y - BETA * g_y(x, y, draws.lower(draws.lower_key))
        kept["z"] = z - ETA * (hessian @ z - f_y(y, draws.upper(upper_key)))
        return x - ALPHA * (x + draws.xi[0] - (C + draws.phi[1]) @ z), y

    state = follow(solver, case, step)
    end = settle(solver, case, state)
    np.testing.assert_allclose(end.x, solution(on_x=False, on_y=False), atol=1e-8)


def multipliers_method(slope, y, m, *, penalty, tolerance, length):
    """y and m of min slope's objective over A y = LEVEL, as `AugmentedLagrangian` has it."""

    def gradient(y, m):
        return slope(y) + A.T @ (m + penalty * (A @ y - LEVEL))

    def residual(y):
        return np.linalg.norm(A @ y - LEVEL)

    while max(residual(y), np.linalg.norm(gradient(y, m))) > tolerance:
        while np.linalg.norm(gradient(y, m)) > max(tolerance, residual(y)):
            y = y - length * gradient(y, m)
        m = m + penalty * (A @ y - LEVEL)
    return y, m


PENALTY, TOLERANCE, DELTA = 3.0, 1e-9, 1e-3
# So that the loops end early, and every one of their steps shows in the last digits.
COARSE = 1e-4
LENGTH = 0.9 / (1 / BETA + PENALTY * 4.0)


def test_ig_al_solves_the_lower_level_and_its_derivative():
    case = problem(lower_set=ON_Y)
    solver = aipod.IGAL(upper_lr=ALPHA, lower_lr=BETA, penalty=PENALTY, tolerance=COARSE)
    inverse = np.linalg.inv(np.block([[G, A.T], [A, np.zeros((2, 2))]]))[:SIZE, :SIZE]
    state = solver.init(case, jnp.asarray(X0), jnp.asarray(Y0))
    x, y, m = X0, Y0, np.zeros(2)
    for _ in range(3):
        y, m = multipliers_method(
            lambda y, x=x: G @ y + C.T @ x,
            y,
            m,
            penalty=PENALTY,
            tolerance=COARSE,
            length=LENGTH,
        )
        x = x - ALPHA * (x - C @ inverse @ (y - TARGET))
        state = solver.step(case, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-11)
        np.testing.assert_allclose(state.x, x, atol=1e-11)
    assert np.max(np.abs(A @ y - LEVEL)) < COARSE
    for _ in range(200):
        state = solver.step(case, state, key=KEY)
    np.testing.assert_allclose(state.x, solution(on_x=False, on_y=True), atol=10 * COARSE)


def test_the_first_order_penalty_method_takes_differences():
    case = problem(upper_set=ON_X, lower_set=ON_Y)
    solver = aipod.FirstOrderPenalty(
        upper_lr=ALPHA, lower_lr=BETA, penalty=PENALTY, tolerance=TOLERANCE, perturbation=DELTA
    )
    pinv = np.linalg.pinv(B)
    state = solver.init(case, jnp.asarray(X0), jnp.asarray(Y0))
    x, plain, mixed = X0, (Y0, np.zeros(2)), (Y0, np.zeros(2))
    inner = {"penalty": PENALTY, "tolerance": TOLERANCE, "length": LENGTH}
    for _ in range(3):
        plain = multipliers_method(lambda y, x=x: G @ y + C.T @ x, *plain, **inner)
        mixed = multipliers_method(
            lambda y, x=x: G @ y + C.T @ x + DELTA * (y - TARGET), *mixed, **inner
        )
        # grad_x g = C y: the difference quotient of first derivatives.
        x = x - ALPHA * (x + C @ (mixed[0] - plain[0]) / DELTA)
        x = x - pinv @ (B @ x - BOUND)
        state = solver.step(case, state, key=KEY)
        np.testing.assert_allclose(state.y, plain[0], atol=1e-10)
        np.testing.assert_allclose(state.x, x, atol=1e-9)
    for _ in range(200):
        state = solver.step(case, state, key=KEY)
    # The bias of a difference quotient is of the order of delta.
    np.testing.assert_allclose(state.x, solution(on_x=True, on_y=True), atol=2 * DELTA)


def test_differences_follow_a_coupling_without_second_derivatives():
    case = problems.nonlinear_coupling()
    solver = aipod.FirstOrderPenalty(upper_lr=1.0, perturbation=1e-5, tolerance=1e-11)
    state = solver.step(case.problem, solver.init(case.problem, case.x, case.y), key=KEY)
    # y is solved to the tolerance here, so that this is the gradient of F.
    exact = aipod.hypergradient(case.problem, case.x, state.y, aipod.Direct())
    np.testing.assert_allclose(case.x - state.x, exact, atol=2e-3 * np.linalg.norm(exact))


NOISY = problem(noise=0.1)
BOTH = problem(upper_set=ON_X, lower_set=ON_Y)
RATE = {"upper_lr": 0.1}


@pytest.mark.parametrize(
    ("solver", "case", "message"),
    [
        (aipod.ALSET(**RATE), problem(upper_set=ON_X), r"ALSET takes no constraint on the upper"),
        (aipod.ALSET(**RATE), problem(lower_set=ON_Y), r"ALSET .* lower level.*aipod\.AiPOD"),
        (aipod.BSA(**RATE), problem(lower_set=ON_Y), r"BSA takes no constraint on the lower"),
        (aipod.StocBiO(**RATE), problem(upper_set=ON_X), r"stocBiO takes no constraint"),
        (aipod.SOBA(**RATE), problem(lower_set=ON_Y), r"SOBA takes no constraint on the lower"),
        (aipod.TTSA(**RATE), BOTH, r"TTSA takes no constraint on the lower .*lower_set is Affine"),
        (aipod.IGAL(**RATE), BOTH, r"IG-AL takes no constraint on the upper"),
        (aipod.IGAL(**RATE), NOISY, r"IG-AL is deterministic.*problem\.expected\(\)"),
        (aipod.FirstOrderPenalty(**RATE), NOISY, r"FirstOrderPenalty is deterministic"),
    ],
)
def test_what_a_method_cannot_do_it_refuses(solver, case, message):
    with pytest.raises(ValueError, match=message):
        solver.init(case, jnp.asarray(X0), jnp.asarray(Y0))


def test_a_product_of_free_parts_is_free():
    free = aipod.Product({"a": aipod.Free(), "b": aipod.Product([aipod.Free()])})
    assert not free.constrained
    assert aipod.Product({"a": aipod.Free(), "b": aipod.Budget(1.0)}).constrained


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aipod.StocBiO(upper_lr=0.1, batch=0), r"batch must be a whole number"),
        (lambda: aipod.BSA(upper_lr=0.1, growth=0.0), r"growth must be positive"),
        (lambda: aipod.BSA(upper_lr=0.1, decay=-1.0), r"decay must be 0 or more"),
        (lambda: aipod.IGAL(upper_lr=0.1, penalty=-1.0), r"penalty \(sigma\) must be positive"),
        (lambda: aipod.IGAL(upper_lr=0.1, tolerance=0.0), r"tolerance must be positive"),
        (
            lambda: aipod.FirstOrderPenalty(upper_lr=0.1, perturbation=0.0),
            r"perturbation \(delta\) must be positive",
        ),
        (lambda: aipod.DifferenceStep(), r"either upper_lr or upper_optimizer"),
        (lambda: aipod.baselines.rule("bsb", 10), r"method must be one of alset.*got 'bsb'"),
        (lambda: aipod.baselines.rule("bsa", 0), r"steps \(K\) must be a whole number"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_augmented_lagrangian_is_not_for_federations():
    case = problems.consensus()
    with pytest.raises(ValueError, match=r"lower_set crosses clients.*EAiPOD"):
        aipod.AugmentedLagrangian().init(case.problem, case.x, case.y)


def test_rules_scale_as_the_papers_say():
    small, large = (
        {
            name: aipod.baselines.rule(name, steps)
            for name in ("alset", "bsa", "stocbio", "ttsa", "soba", "first-order-penalty")
        }
        for steps in (100, 10_000)
    )
    for name, argument, power in (
        ("alset", "upper_lr", -0.5),
        ("alset", "lower_lr", -0.5),
        ("bsa", "upper_lr", -0.5),
        ("stocbio", "batch", 1.0),
        ("ttsa", "upper_lr", -0.6),
        ("ttsa", "lower_lr", -0.4),
        ("soba", "adjoint_lr", -0.5),
        ("first-order-penalty", "perturbation", -0.5),
    ):
        assert large[name][argument] / small[name][argument] == pytest.approx(100**power)
