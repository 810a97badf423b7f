"""The hypergradient and its reference values, against finite differences and dense algebra."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.sparse
from jax.flatten_util import ravel_pytree

import aipod
from tests import problems
from tests.problems import CASES

BY_NAME = {case.name: case for case in CASES}
EXACT = {"direct": aipod.Direct(), "cg": aipod.ConjugateGradient(rtol=1e-12)}


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def relative_error(value, reference):
    return np.linalg.norm(flat(value) - flat(reference)) / np.linalg.norm(flat(reference))


@functools.cache
def finite_differences(name: str, step: float = 1e-5):
    """Central differences of F(x) = f(x, exact_lower(x)) in every entry of x, and y*(x)."""
    case = BY_NAME[name]
    centre, restore = ravel_pytree(case.x)
    samples = case.problem.upper_samples
    batch = None if samples is None else samples.expected()

    def value(entries):
        x = restore(entries)
        y = aipod.exact_lower(case.problem, x, case.y)
        return case.problem.upper(x, y, batch), y

    steps = step * np.eye(centre.size)
    points = centre[None] + jnp.asarray(np.concatenate([steps, -steps, 0 * steps[:1]]))
    values, solutions = jax.jit(jax.vmap(value))(points)
    forward, backward = values[: centre.size], values[centre.size : -1]
    gradient = (forward - backward) / (2 * step)
    return np.asarray(gradient), jax.tree.map(lambda leaf: leaf[-1], solutions)


@pytest.mark.parametrize("adjoint", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_finite_differences(case, adjoint):
    expected, y = finite_differences(case.name)
    gradient = aipod.hypergradient(case.problem, case.x, y, adjoint)
    assert jax.tree.structure(gradient) == jax.tree.structure(case.x)
    assert relative_error(gradient, expected) < 1e-6


# -- The formula, written out once more and mutilated ------------------------------------------

TERMS = ("grad_x f", "grad_xy g z", "L' grad_y f", "L' grad_yy g z")


def derivatives(data: problems.Nonlinear, x, y):
    """grad_x f, grad_y f, grad_yy g, the Jacobian of grad_y g in x, and that of h."""

    @jax.jit
    def compute(x, y):
        return (
            *jax.grad(data.upper, argnums=(0, 1))(x, y),
            jax.hessian(data.lower, argnums=1)(x, y),
            jax.jacfwd(jax.grad(data.lower, argnums=1), argnums=0)(x, y),
            jax.jacfwd(data.coupling)(x),
        )

    return [np.asarray(value) for value in compute(x, y)]


def dense_hypergradient(data: problems.Nonlinear, x, y, leave_out=(), damping=0.0):
    """The paper's formula with an explicit basis V2, explicit Hessians and Jacobians."""
    basis = scipy.linalg.null_space(data.A)
    upper_x, upper_y, hessian_yy, hessian_yx, slope = derivatives(data, x, y)
    moving = -np.linalg.pinv(data.A) @ slope
    damped = hessian_yy + damping * np.eye(len(hessian_yy))
    z = basis @ np.linalg.solve(basis.T @ damped @ basis, basis.T @ upper_y)
    parts = {
        "grad_x f": upper_x,
        "grad_xy g z": -hessian_yx.T @ z,
        "L' grad_y f": moving.T @ upper_y,
        "L' grad_yy g z": -moving.T @ hessian_yy @ z,
    }
    return sum(part for name, part in parts.items() if name not in leave_out)


def test_formula_with_an_explicit_basis_agrees():
    case, data = BY_NAME["nonlinear-coupling"], problems.nonlinear_data()
    expected, y = finite_differences(case.name)
    assert relative_error(dense_hypergradient(data, case.x, y), expected) < 1e-6
    # The two agree away from the solution too, where the algorithms use the formula.
    for point in (y, case.y):
        dense = dense_hypergradient(data, case.x, point)
        for adjoint in EXACT.values():
            gradient = aipod.hypergradient(case.problem, case.x, point, adjoint)
            assert relative_error(gradient, dense) < 1e-10


@pytest.mark.parametrize(
    "leave_out", [*((term,) for term in TERMS), TERMS[2:]], ids=lambda terms: " and ".join(terms)
)
def test_formula_without_any_one_term_is_caught(leave_out):
    case, data = BY_NAME["nonlinear-coupling"], problems.nonlinear_data()
    expected, y = finite_differences(case.name)
    mutilated = dense_hypergradient(data, case.x, y, leave_out)
    assert relative_error(mutilated, expected) > 1e-2


# -- The lower solution --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_lower_is_feasible_and_stationary(case):
    _, y = finite_differences(case.name)
    samples = case.problem.lower_samples
    batch = None if samples is None else samples.expected()

    @jax.jit
    def violations(x, y):
        gradient = jax.grad(case.problem.lower, argnums=1)(x, y, batch)
        lower_set = case.problem.lower_set
        return lower_set.residual(y, x), lower_set.cotangent(gradient)

    assert np.max(np.abs(flat(violations(case.x, y)))) < 1e-10


def test_exact_lower_of_the_synthetic_problem_is_its_closed_form():
    case, data = BY_NAME["synthetic"], problems.synthetic_matrices()
    _, y = finite_differences(case.name)
    np.testing.assert_allclose(y, data.lower_solution(np.asarray(case.x)), atol=1e-12)


def test_exact_lower_of_a_quadratic_solves_the_kkt_system():
    case, data = BY_NAME["quadratic"], problems.quadratic_matrices()
    rows = len(data.A)
    matrix = np.block([[data.G, data.A.T], [data.A, np.zeros((rows, rows))]])
    right = np.concatenate([-data.K @ np.asarray(case.x) - data.b, data.c])
    expected = np.linalg.lstsq(matrix, right, rcond=1e-12)[0][: len(data.G)]
    np.testing.assert_allclose(finite_differences(case.name)[1], expected, atol=1e-11)


def test_exact_lower_of_a_logistic_regression_agrees_with_scipy():
    case = BY_NAME["logistic"]
    batch = case.problem.lower_samples.expected()
    objective = jax.jit(jax.value_and_grad(lambda y: case.problem.lower(case.x, y, batch)))
    found = scipy.optimize.minimize(
        lambda y: [np.asarray(part, float) for part in objective(y)],
        np.asarray(case.y),
        jac=True,
        method="SLSQP",
        constraints={"type": "eq", "fun": np.sum, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    np.testing.assert_allclose(finite_differences(case.name)[1], found.x, atol=1e-6)


def test_exact_lower_does_not_depend_on_its_start():
    case = BY_NAME["nonlinear-coupling"]
    _, expected = finite_differences(case.name)
    for start in (None, 30 * case.y):
        y = aipod.exact_lower(case.problem, case.x, start)
        np.testing.assert_allclose(y, expected, atol=1e-11)


UNSOLVABLE = {
    # No minimum: the slope never vanishes.
    "linear": (lambda x, y, _: jnp.sum(y), 100),
    # Convex, but one Newton step is not enough.
    "too-few-steps": (lambda x, y, _: jnp.sum(jnp.cosh(y - x)), 1),
}


@pytest.mark.parametrize(("lower", "max_steps"), UNSOLVABLE.values(), ids=UNSOLVABLE)
def test_unsolved_lower_level_raises_and_is_nan_under_jit(lower, max_steps):
    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(x * y), lower)
    x, y = jnp.arange(3.0), jnp.zeros(3)

    def solve(x):
        return aipod.exact_lower(problem, x, y, max_steps=max_steps)

    with pytest.raises(RuntimeError, match=r"not solved.*strongly convex"):
        solve(x)
    assert np.all(np.isnan(jax.jit(solve)(x)))


def test_unsolved_lower_level_does_not_spoil_its_neighbours_under_vmap():
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(y), lambda x, y, _: jnp.sum(x * y**2 / 2 - y), aipod.Free()
    )
    x = jnp.array([[0.0], [2.0]])
    y = jax.vmap(lambda x: aipod.exact_lower(problem, x, jnp.zeros(1)))(x)
    assert np.isnan(y[0, 0])
    np.testing.assert_allclose(y[1], 0.5)


# -- Neumann -------------------------------------------------------------------------------------


def adjoint_only(samples=None, size=8):
    """A problem whose hypergradient is z itself: f = v'y, g = 1/2 s y'G y - x'y, s the sample."""
    rng = np.random.default_rng(20)
    G = problems.positive_definite(rng, size, low=0.2, high=2.0)
    A = problems.repeat_rows(rng.normal(size=(2, size)), 0)
    v = rng.normal(size=size)

    def lower(x, y, batch):
        strength = 1.0 if batch is None else jnp.mean(batch)
        return 0.5 * strength * y @ G @ y - x @ y

    problem = aipod.Bilevel(
        lambda x, y, _: v @ y, lower, lower_set=aipod.Affine(A), lower_samples=samples
    )
    basis = scipy.linalg.null_space(A)
    spectrum, axes = np.linalg.eigh(basis.T @ G @ basis)
    return problem, spectrum, axes.T @ basis.T @ v, basis @ axes


def test_neumann_is_the_truncated_series_and_converges_at_its_rate():
    problem, spectrum, right, axes = adjoint_only()
    x = y = jnp.zeros(8)
    low, high = spectrum[[0, -1]]
    exact = aipod.hypergradient(problem, x, y, aipod.Direct())
    np.testing.assert_allclose(exact, axes @ (right / spectrum), atol=1e-12)
    errors = {}
    for steps in (1, 2, 5, 20, 60, 80):
        z = aipod.hypergradient(problem, x, y, aipod.Neumann(steps, lr=1 / high))
        # In the eigenbasis each term of the series is a power.
        series = sum((1 - spectrum / high) ** n for n in range(steps)) / high
        np.testing.assert_allclose(z, axes @ (series * right), atol=1e-12)
        errors[steps] = np.linalg.norm(z - exact)
        assert errors[steps] <= (1 - low / high) ** steps * np.linalg.norm(exact) * (1 + 1e-9)
    # Far out the slowest mode is alone, and the bound is the rate itself.
    np.testing.assert_allclose(errors[80] / errors[60], (1 - low / high) ** 20, rtol=1e-2)


@pytest.mark.parametrize("name", ["nonlinear-coupling", "weighted-consensus", "composite"])
def test_neumann_with_the_default_step_converges_to_direct(name):
    case = BY_NAME[name]
    gradient = aipod.hypergradient(case.problem, case.x, case.y, aipod.Neumann(600))
    exact = aipod.hypergradient(case.problem, case.x, case.y, aipod.Direct())
    assert relative_error(gradient, exact) < 1e-6


def test_neumann_random_draw_is_unbiased_for_the_sum(key):
    # Strongly varying samples: one sample shared by all factors would be biased, and be seen.
    problem, *_ = adjoint_only(aipod.Minibatches(jnp.array([0.2, 0.4, 2.4]), 1))
    x = y = jnp.zeros(8)
    expected = aipod.hypergradient(problem, x, y, aipod.Neumann(6, lr=0.25))

    @jax.vmap
    def draw(key):
        adjoint = aipod.Neumann(6, lr=0.25, random=True)
        return aipod.hypergradient(problem, x, y, adjoint, key=key)

    draws = np.asarray(draw(jax.random.split(key, 10_000)))
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - expected) <= 4 * error)
    # The test has teeth: it would notice a bias of a tenth.
    assert np.any(4 * error < 0.1 * np.abs(expected))


def test_sampled_hypergradient_is_unbiased_in_every_term(key):
    # At a fixed y each term is linear in its own sample, so its mean is the expectation.
    case, data = BY_NAME["nonlinear-coupling"], problems.nonlinear_data()
    spread = jnp.array([0.5, 1.0, 1.5])

    def scaled(objective):
        return lambda x, y, batch: jnp.mean(batch) * objective(x, y)

    problem = aipod.Bilevel(
        scaled(data.upper),
        scaled(data.lower),
        lower_set=case.problem.lower_set,
        upper_samples=aipod.Minibatches(spread, 2),
        lower_samples=aipod.Minibatches(spread, 2),
    )
    adjoint = aipod.Neumann(5, lr=0.3)
    expected = aipod.hypergradient(problem, case.x, case.y, adjoint)
    draw = jax.vmap(lambda k: aipod.hypergradient(problem, case.x, case.y, adjoint, key=k))
    draws = np.asarray(draw(jax.random.split(key, 10_000)))
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert np.all(error > 0)
    assert np.all(np.abs(draws.mean(axis=0) - expected) <= 4 * error)


def test_damping_is_a_ridge_on_the_lower_curvature():
    case, data = BY_NAME["nonlinear-coupling"], problems.nonlinear_data()
    # z comes from the damped Hessian; everything else is as it was.
    expected = dense_hypergradient(data, case.x, case.y, damping=0.3)
    for adjoint in (
        aipod.Direct(damping=0.3),
        aipod.ConjugateGradient(rtol=1e-12, damping=0.3),
        aipod.Neumann(400, lr=0.3, damping=0.3),
    ):
        gradient = aipod.hypergradient(case.problem, case.x, case.y, adjoint)
        assert relative_error(gradient, expected) < 1e-9


# -- Equivalent problems have equal hypergradients ---------------------------------------------


def consensus_matrix(clients: int, size: int) -> np.ndarray:
    """The paper's A (label A-V2): differences of neighbours, for every coordinate."""
    differences = np.eye(clients)[:-1] - np.eye(clients)[1:]
    return np.kron(differences, np.eye(size))


def test_consensus_is_affine_with_the_explicit_matrix():
    case = BY_NAME["consensus"]
    explicit = aipod.Affine(consensus_matrix(*case.y.shape))
    agree = case.problem.lower_set
    np.testing.assert_allclose(agree.project(case.y), explicit.project(case.y), atol=1e-13)
    np.testing.assert_allclose(agree.tangent(case.y), explicit.tangent(case.y), atol=1e-13)
    affine = aipod.Bilevel(case.problem.upper, case.problem.lower, explicit, explicit)
    y = aipod.exact_lower(affine, case.x, case.y)
    np.testing.assert_allclose(y, finite_differences(case.name)[1], atol=1e-12)
    for adjoint in EXACT.values():
        gradient = aipod.hypergradient(case.problem, case.x, y, adjoint)
        assert relative_error(gradient, aipod.hypergradient(affine, case.x, y, adjoint)) < 1e-10


def test_a_sparse_matrix_gives_the_same_hypergradient():
    # The derivative of the coupling passes through the iterative solve.
    case, data = BY_NAME["nonlinear-coupling"], problems.nonlinear_data()
    lower_set = aipod.Affine(scipy.sparse.csr_array(data.A), data.c, coupling=data.coupling)
    problem = eqx.tree_at(lambda p: p.lower_set, case.problem, lower_set)
    gradient = aipod.hypergradient(problem, case.x, case.y, aipod.Direct())
    assert relative_error(gradient, dense_hypergradient(data, case.x, case.y)) < 1e-9


def test_composite_is_the_plain_objective(key):
    case = BY_NAME["composite"]
    plain = aipod.Bilevel(
        lambda x, y, batch: case.problem.upper(x, y, batch),
        lambda x, y, batch: case.problem.lower(x, y, batch),
        lower_set=case.problem.lower_set,
        upper_samples=case.problem.upper_samples,
        lower_samples=case.problem.lower_samples,
    )
    # Eight batches of ten from twenty examples: the features are computed once, for all.
    adjoint = aipod.Neumann(8)
    gradient = aipod.hypergradient(case.problem, case.x, case.y, adjoint, key=key)
    expected = aipod.hypergradient(plain, case.x, case.y, adjoint, key=key)
    assert relative_error(gradient, expected) < 1e-12


# -- Stationarity ----------------------------------------------------------------------------------


def test_stationarity_is_the_projected_gradient_squared():
    case, data = BY_NAME["synthetic"], problems.synthetic_matrices()
    gradient, _ = finite_differences(case.name)
    projected = gradient - np.linalg.pinv(data.B) @ (data.B @ gradient)
    value = aipod.stationarity(case.problem, case.x)
    np.testing.assert_allclose(value, projected @ projected, rtol=1e-6)
    assert value < 0.999 * gradient @ gradient


def test_stationarity_of_weighted_clients_is_zero_where_their_gradients_cancel():
    case = BY_NAME["weighted-consensus"]
    gradient, _ = finite_differences(case.name)
    total = gradient.reshape(case.x.shape).sum(axis=0)
    value = aipod.stationarity(case.problem, case.x, case.y)
    np.testing.assert_allclose(value, total @ total / len(case.x), rtol=1e-6)


def test_stationarity_vanishes_at_a_solution():
    case = BY_NAME["quadratic"]
    # F is a quadratic here: its gradient at a few points tells where it vanishes on the set.
    gradient = jax.jit(lambda x: aipod.exact_hypergradient(case.problem, x))
    offset = gradient(jnp.zeros(6))
    hessian = np.stack([gradient(row) - offset for row in jnp.eye(6)], axis=1)
    B, e = case.problem.upper_set.map.matrix, case.problem.upper_set.target
    matrix = np.block([[hessian, B.T], [B, np.zeros((2, 2))]])
    x = np.linalg.solve(matrix, np.concatenate([-offset, e]))[:6]
    assert aipod.stationarity(case.problem, jnp.asarray(x)) < 1e-18
    assert aipod.stationarity(case.problem, case.x) > 1e-2


# -- Transformations -------------------------------------------------------------------------------


def test_jit_and_vmap_agree_with_eager():
    case = BY_NAME["nonlinear-coupling"]

    def gradient(x):
        return aipod.hypergradient(case.problem, x, case.y, EXACT["cg"])

    alone = gradient(case.x)
    together = jax.vmap(gradient)(jnp.stack([0.5 * case.x, case.x]))
    assert relative_error(together[1], alone) < 1e-10
    assert relative_error(together[0], gradient(0.5 * case.x)) < 1e-10
    assert relative_error(jax.jit(gradient)(case.x), alone) < 1e-10


def test_an_upper_objective_without_y_needs_no_adjoint():
    # grad_y f = 0: conjugate gradients start at the solution and must not divide by zero.
    case = BY_NAME["nonlinear-coupling"]
    problem = eqx.tree_at(lambda p: p.upper, case.problem, lambda x, y, _: jnp.sum(x**2))
    gradient = aipod.hypergradient(problem, case.x, case.y, EXACT["cg"])
    np.testing.assert_allclose(gradient, 2 * case.x, atol=1e-14)


def test_a_set_of_one_point_leaves_only_the_coupling():
    # A square and regular: y = A^-1 (c - h(x)), and z is zero.
    rng = np.random.default_rng(30)
    A, H = rng.normal(size=(4, 4)), rng.normal(size=(4, 3))
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(jnp.sin(y)),
        lambda x, y, _: jnp.sum(y**2),
        lower_set=aipod.Affine(A, 1.0, coupling=H),
    )
    x = jnp.asarray(rng.normal(size=3))
    solution = np.linalg.solve(A, 1 - H @ np.asarray(x))
    np.testing.assert_allclose(aipod.exact_lower(problem, x), solution, atol=1e-10)
    expected = -np.linalg.solve(A, H).T @ np.cos(solution)
    np.testing.assert_allclose(aipod.exact_hypergradient(problem, x), expected, atol=1e-9)


def _bent(sign):
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x * y) + jnp.sum(y**3),
        lambda x, y, _: 0.5 * jnp.sum(jnp.array([1.0, sign]) * y**2) - x @ y,
    )
    return problem, jnp.array([1.0, 2.0]), jnp.array([0.5, 1.0])


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_conjugate_gradients_that_break_down_say_so(sign):
    problem, x, y = _bent(sign)
    with pytest.raises(RuntimeError, match="does not bend up"):
        aipod.hypergradient(problem, x, y)
    inside = jax.jit(lambda x: aipod.hypergradient(problem, x, y))(x)
    assert np.all(np.isnan(inside))
    for function in (aipod.exact_lower, aipod.exact_hypergradient, aipod.stationarity):
        with pytest.raises(RuntimeError, match="does not bend up"):
            function(problem, x, y)


def test_a_saddle_still_has_a_hypergradient_by_a_dense_solve():
    problem, x, y = _bent(-1.0)
    slope = x + 3 * y**2
    # z = slope / (1, -1), w = z since grad_xy g = -I.
    wanted = y + slope / jnp.array([1.0, -1.0])
    found = aipod.hypergradient(problem, x, y, aipod.Direct())
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    problem, x, y = _bent(0.0)
    with pytest.raises(RuntimeError, match="singular"):
        aipod.hypergradient(problem, x, y, aipod.Direct())


def test_conjugate_gradients_that_stall_say_how_far_they_came():
    """Curvatures over 14 powers of ten in single precision."""
    curvature = jnp.asarray(np.geomspace(1e-12, 1e2, 40), jnp.float32)
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x * y), lambda x, y, _: 0.5 * jnp.sum(curvature * (y - x) ** 2)
    )
    ones = jnp.ones(40, jnp.float32)
    with pytest.raises(RuntimeError, match=r"stalled at a relative residual of (0\.[0-9]+|1),"):
        aipod.hypergradient(problem, ones, ones)
    few = aipod.ConjugateGradient(max_steps=3)
    assert np.all(np.isfinite(aipod.hypergradient(problem, ones, ones, few)))
