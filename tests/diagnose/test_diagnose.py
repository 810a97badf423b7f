"""`check` finds what is wrong, says nothing is where nothing is, and never raises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

import aipod
from aipod.diagnose import Report, check
from aipod.diagnose._measure import mismatch
from aipod.federated import federate, replicate
from tests.problems import CASES, Case, positive_definite, repeat_rows

SOUND = ["quadratic", "weighted-consensus", "product"]
SIZE = 6


@functools.cache
def report_of(name: str) -> tuple[Case, Report]:
    (case,) = [case for case in CASES if case.name == name]
    return case, check(case.problem, case.x, case.y, key=jax.random.key(3))


def finding(report: Report, name: str):
    (found,) = [f for f in report.findings if f.name == name]
    return found


def quadratic_problem(G, upper=None, lower=None, **options) -> aipod.Bilevel:
    """g = 1/2 y'G y - x'y, where neither objective is given."""
    return aipod.Bilevel(
        upper or (lambda x, y, _: jnp.sum((y - 1.0) ** 2) + jnp.sum(x**2)),
        lower or (lambda x, y, _: 0.5 * y @ jnp.asarray(G) @ y - x @ y),
        **options,
    )


def run(problem: aipod.Bilevel, x=None, y=None) -> Report:
    start = jnp.linspace(0.5, 1.5, SIZE)
    return check(
        problem, start if x is None else x, start if y is None else y, key=jax.random.key(0)
    )


# A_ONE leaves all of Ker A = {sum of y is 0}.
A_ONE = np.ones((1, SIZE))


@pytest.mark.parametrize("name", SOUND)
def test_curvature_is_that_of_the_dense_hessian(name):
    case, report = report_of(name)
    problem = case.problem
    y = problem.lower_set.project(case.y, case.x)
    flat, restore = ravel_pytree(y)
    hessian = np.array(jax.hessian(lambda t: problem.lower(case.x, restore(t), None))(flat))
    riesz = ravel_pytree(problem.lower_set.riesz(restore(jnp.ones_like(flat))))[0]
    metric = np.diag(1 / np.array(riesz))
    tangent = jax.vmap(lambda v: ravel_pytree(problem.lower_set.tangent(restore(v)))[0])
    kernel = scipy.linalg.orth(np.array(tangent(jnp.eye(flat.size))).T)

    whole = scipy.linalg.eigh(hessian, metric, eigvals_only=True)
    inside = scipy.linalg.eigh(
        kernel.T @ hessian @ kernel, kernel.T @ metric @ kernel, eigvals_only=True
    )
    found = report.lower_curvature
    np.testing.assert_allclose((found.whole.smallest, found.whole.largest), whole[[0, -1]], 1e-6)
    np.testing.assert_allclose((found.kernel.smallest, found.kernel.largest), inside[[0, -1]], 1e-6)
    assert found.whole.settled
    assert found.kernel.settled
    # The two spectra differ, or the test could not tell them apart.
    assert whole[0] < inside[0] - 1e-3
    assert whole[-1] > inside[-1] + 1e-3
    assert report.suggested["lower_lr"] == pytest.approx(1 / whole[-1], rel=1e-6)
    assert report.suggested["adjoint_lr"] == pytest.approx(1 / whole[-1], rel=1e-6)
    assert report.dimensions["lower_set"] == kernel.shape[1]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_problem_has_no_errors(name):
    case, report = report_of(name)
    assert report.ok
    assert max(report.gradient_errors.values()) < 1e-6
    assert report.hypergradient_error < 1e-6
    # The only fault: these cases start with y0 off its set.
    assert [f.name for f in report.findings if f.status != "ok"] == ["y0"]
    distance = ravel_pytree(case.problem.lower_set.project(case.y, case.x))[0]
    distance = float(jnp.linalg.norm(distance - ravel_pytree(case.y)[0]))
    assert f"{distance:.3g} away" in finding(report, "y0").value


def test_upper_step_is_the_inverse_curvature_of_F():
    # y* = x on the plane, so F = |x - 1|^2 + |x|^2 has curvature 4 in every direction.
    report = run(quadratic_problem(np.eye(SIZE)))
    assert report.suggested["upper_lr"] == pytest.approx(0.25, rel=1e-4)
    # With G y* = x this F is linear, but for rounding: no curvature, and no step from it.
    G = jnp.asarray(positive_definite(np.random.default_rng(2), SIZE))
    flat = run(quadratic_problem(G, upper=lambda x, y, _: jnp.sum(y) + x @ y - y @ G @ y))
    assert "upper_lr" not in flat.suggested
    assert "no upper_lr" in finding(flat, "step sizes").value


def test_ranks_count_redundant_rows_once():
    rng = np.random.default_rng(0)
    A = repeat_rows(rng.normal(size=(2, SIZE)), 0, 1)
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum(x**2),
        lambda x, y, _: 0.5 * sum(jnp.sum(part**2) for part in y),
        upper_set=aipod.Budget(6.0),
        lower_set=aipod.Product(
            [aipod.Affine(A), aipod.Consensus(), aipod.Flow([0, 1], [1, 0], np.zeros((3, 2)))]
        ),
    )
    y = [jnp.zeros(SIZE), jnp.zeros((4, 2)), jnp.zeros((3, 2))]
    report = run(problem, y=y)
    assert report.ok
    # Affine 2 of 4 rows, Consensus (4 - 1) * 2, Flow 1 of 2 nodes for each of 3 commodities.
    assert report.ranks == {"upper_set": 1, "lower_set": 2 + 6 + 3}
    assert report.dimensions == {"upper_set": 5, "lower_set": 4 + 2 + 3}
    assert "16 constraints of rank 11" in finding(report, "lower_set").value


def test_an_operator_is_not_factored_but_its_kernel_is_seen():
    operator = lx.MatrixLinearOperator(jnp.asarray(A_ONE))
    G = np.diag(np.arange(1.0, 1.0 + SIZE))
    # Without an expectation the lower level is not solved, which takes long with an operator.
    options = {"upper_samples": jax.random.normal}
    report = run(quadratic_problem(G, lower_set=aipod.Affine(operator, 6.0), **options))
    dense = run(quadratic_problem(G, lower_set=aipod.Affine(A_ONE, 6.0), **options))
    assert report.ranks["lower_set"] is None
    assert "not factored" in finding(report, "lower_set").value
    kernel, same = report.lower_curvature.kernel, dense.lower_curvature.kernel
    assert kernel.smallest == pytest.approx(same.smallest, rel=1e-8)
    assert kernel.largest == pytest.approx(same.largest, rel=1e-8)


@pytest.mark.parametrize("operator", [False, True])
def test_y_determined_by_its_constraints(operator):
    A = jnp.asarray(positive_definite(np.random.default_rng(1), SIZE))
    lower_set = aipod.Affine(lx.MatrixLinearOperator(A) if operator else A, 1.0, coupling=jnp.sin)
    options = {"upper_samples": jax.random.normal} if operator else {}
    report = run(quadratic_problem(-np.eye(SIZE), lower_set=lower_set, **options))
    assert report.ok
    assert report.lower_curvature.kernel is None
    assert report.dimensions["lower_set"] == (None if operator else 0)
    assert "determine y" in finding(report, "lower curvature").value
    assert operator or report.hypergradient_error < 1e-6


def test_a_coupling_that_empties_the_set_is_found():
    A = np.ones((2, SIZE))
    problem = quadratic_problem(
        np.eye(SIZE), lower_set=aipod.Affine(A, 0.0, coupling=lambda x: x[:2])
    )
    report = run(problem)
    assert not report.ok
    assert len(report.findings) == 1
    assert "is empty" in finding(report, "fit").value


def test_a_set_that_empties_on_the_way_to_the_upper_set_is_found():
    # At x0 both rows ask for the same; where x0 projects to they do not.
    problem = quadratic_problem(
        np.eye(SIZE),
        upper_set=aipod.Affine(np.eye(SIZE)[:1], 3.0),
        lower_set=aipod.Affine(np.ones((2, SIZE)), 0.0, coupling=lambda x: x[:2]),
    )
    report = run(problem, x=jnp.ones(SIZE))
    assert "2 away from the upper_set" in finding(report, "x0").value
    assert finding(report, "lower_set").status == "error"
    assert "misses by 1" in finding(report, "lower_set").value


def test_nonconvex_on_the_kernel_is_an_error():
    G = np.diag([-0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    report = run(quadratic_problem(G))
    assert report.lower_curvature.kernel.smallest == pytest.approx(-0.5)
    curvature = finding(report, "lower curvature")
    assert curvature.status == "error"
    assert "mu above 0.5" in curvature.remedy
    assert "mended" in finding(report, "hypergradient").value
    assert not report.ok


def test_flat_on_the_kernel_is_an_error():
    report = run(quadratic_problem(np.diag([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])))
    assert finding(report, "lower curvature").status == "error"


def test_convex_on_the_kernel_only_is_a_warning():
    G = np.eye(SIZE) - 1.5 * np.ones((SIZE, SIZE)) / SIZE
    report = run(quadratic_problem(G, lower_set=aipod.Affine(A_ONE, 1.0)))
    assert report.lower_curvature.whole.smallest == pytest.approx(-0.5)
    assert report.lower_curvature.kernel.smallest == pytest.approx(1.0)
    assert finding(report, "lower curvature").status == "warning"
    assert "lower_prob=1" in finding(report, "lower curvature").remedy
    assert report.ok
    assert report.hypergradient_error < 1e-6


def test_bad_conditioning_is_a_warning():
    report = run(quadratic_problem(np.diag([1.0, 1.0, 1.0, 1.0, 1.0, 1e5])))
    assert finding(report, "lower curvature").status == "warning"
    assert "1e+05" in finding(report, "lower curvature").value
    assert report.ok


def clients_bending(hessians) -> Report:
    """Of clients with the losses 1/2 (y - x)' G (y - x)."""
    data = jnp.asarray(hessians)[:, None]
    problem = federate(
        lambda x, y, _: jnp.sum((y - 1.0) ** 2),
        lambda x, y, batch: 0.5 * jnp.dot(batch[0] @ (y - x), y - x),
        data,
        data,
        batch_size=None,
    )
    points = replicate(jnp.ones(data.shape[-1]), len(data))
    return run(problem, x=points, y=points)


def test_clients_that_bend_unlike_are_a_warning():
    # Each bends along its own direction, by 1 to 20: so the mean bends by 1 / 40 at its least.
    # Elsewhere all bend by 0.005.
    own = np.linspace(1, 20, 40)[:, None, None] * np.eye(40)[:, :, None] * np.eye(40)[:, None, :]
    found = finding(clients_bending(own + 0.005 * np.eye(40)), "lower curvature")
    assert found.status == "warning"
    assert "some 667 of them" in found.value
    assert "the clients' data" in found.remedy


def test_one_stiff_client_among_few_is_none():
    # It makes the mean bend as well: half as much as itself.
    report = clients_bending(np.array([1.0, 1e6])[:, None, None] * np.eye(3))
    assert finding(report, "lower curvature").status == "ok"


def test_what_is_fixed_may_bend_too_much_for_the_rest():
    G = np.eye(SIZE) + 1e3 * np.ones((SIZE, SIZE)) / SIZE
    report = run(quadratic_problem(G, lower_set=aipod.Affine(A_ONE, 1.0)))
    found = finding(report, "lower curvature")
    assert found.status == "warning"
    assert "what A fixes" in found.remedy
    assert "1e+03 of them" in found.value


def test_more_dimensions_than_lanczos_steps():
    values = np.linspace(1.0, 3.0, 300)
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - x) ** 2),
        lambda x, y, _: 0.5 * jnp.sum(jnp.asarray(values) * (y - x) ** 2),
    )
    found = run(problem, x=jnp.ones(()), y=jnp.ones(300)).lower_curvature.whole
    assert 1.0 <= found.smallest < 1.01
    assert 2.99 < found.largest <= 3.0


@jax.custom_vjp
def wrongly_squared(v):
    return jnp.sum(v**2)


wrongly_squared.defvjp(lambda v: (jnp.sum(v**2), v), lambda v, ct: (3.0 * v * ct,))


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("variable", ["x", "y"])
@pytest.mark.parametrize("fault", ["custom_vjp", "stop_gradient"])
def test_a_wrong_gradient_is_found(level, variable, fault):
    if fault == "custom_vjp":
        square = wrongly_squared
    else:

        def square(v):
            return 2 * jnp.sum(v**2) - jax.lax.stop_gradient(jnp.sum(v**2))

    def objective(x, y, _):
        wrong, right = (x, y) if variable == "x" else (y, x)
        return square(wrong) + jnp.sum(right**2)

    report = run(quadratic_problem(np.eye(SIZE), **{level: objective}))
    assert finding(report, f"{level} gradient").status == "error"
    other = "lower" if level == "upper" else "upper"
    assert finding(report, f"{other} gradient").status == "ok"
    bad = {name for name, error in report.gradient_errors.items() if error > 1e-4}
    assert bad == {f"{level}_{variable}"}


def test_a_wrong_second_derivative_is_found():
    @jax.custom_jvp
    def product(x, y):
        return x @ y

    # The gradient in y is right, x, but it is made not to move with x: grad_xy g is 0.
    @product.defjvp
    def _(primals, tangents):
        x, y = primals
        return x @ y, jax.lax.stop_gradient(x) @ tangents[1] + y @ tangents[0]

    def lower(x, y, _):
        return 0.5 * jnp.sum(y**2) - product(x, y)

    report = run(quadratic_problem(None, lower=lower, upper=lambda x, y, _: jnp.sum(y**3)))
    assert finding(report, "lower gradient").status == "ok"
    assert finding(report, "hypergradient").status == "error"
    assert not report.ok


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_an_objective_that_is_not_finite_is_named(level):
    report = run(quadratic_problem(np.eye(SIZE), **{level: lambda x, y, _: jnp.log(-jnp.sum(x))}))
    assert finding(report, level).status == "error"
    assert f"{level}: value" in finding(report, level).value
    assert finding(report, "lower" if level == "upper" else "upper").status == "ok"
    assert report.lower_curvature is None


def test_a_gradient_that_is_not_finite_is_named():
    report = run(quadratic_problem(np.eye(SIZE), upper=lambda x, y, _: jnp.linalg.norm(x - y)))
    assert "gradient in x, gradient in y NaN" in finding(report, "upper").value
    assert "value" not in finding(report, "upper").value


def test_only_some_batches_are_not_finite():
    class Sampler:
        def __call__(self, key):
            return jnp.nan * jax.random.normal(key)

        def expected(self):
            return jnp.zeros(())

    problem = quadratic_problem(
        None, lower=lambda x, y, noise: jnp.sum((x - y + noise) ** 2), lower_samples=Sampler()
    )
    found = finding(run(problem), "lower")
    assert found.status == "error"
    assert "on a sampled batch" in found.value


def test_a_second_derivative_that_is_not_finite_is_an_error():
    def lower(x, y, _):
        return jnp.sum(jnp.abs(y) ** 1.5) + jnp.sum(x)

    report = run(quadratic_problem(None, lower=lower), y=jnp.zeros(SIZE))
    assert finding(report, "lower curvature").status == "error"
    assert "second derivative" in finding(report, "lower curvature").value


@pytest.mark.parametrize(
    ("options", "x", "y", "name", "text"),
    [
        ({"lower_set": aipod.Affine(np.ones((1, 4)))}, None, None, "fit", "has 4 columns"),
        ({"upper": lambda x, y, _: x}, None, None, "fit", "must return a scalar"),
        ({}, None, jnp.zeros(4), "fit", "raised"),
        ({}, jnp.arange(SIZE), None, "fit", "floating-point"),
        ({}, "a word", None, "fit", "raised"),
        ({}, None, jnp.full(SIZE, jnp.nan), "y0", "NaN"),
        ({}, jnp.full(SIZE, jnp.inf), None, "x0", "infinity"),
        ({}, None, {}, "y0", "no numbers"),
        ({"upper": lambda x, y, _: x["missing"]}, None, None, "fit", "raised"),
        ({"lower_samples": lambda key: {}["key"]}, None, None, "fit", "raised KeyError"),
    ],
)
def test_bad_input_is_one_error_and_no_exception(options, x, y, name, text):
    report = run(quadratic_problem(np.eye(SIZE), **options), x=x, y=y)
    assert [f.name for f in report.findings] == [name]
    assert not report.ok
    assert text in report.findings[0].value
    assert report.findings[0].remedy


def test_functions_that_raise_only_when_run_are_quoted():
    def lower(x, y, _):
        # Second derivatives of this one raise: the rule of custom_vjp cannot be differentiated.
        return once_only(y) + jnp.sum((x - y) ** 2)

    @jax.custom_vjp
    def once_only(y):
        return jnp.sum(y**2)

    @jax.custom_jvp
    def refuse(y):
        return 2 * y

    @refuse.defjvp
    def _(primals, tangents):
        raise NotImplementedError("only once differentiable")

    once_only.defvjp(lambda y: (jnp.sum(y**2), y), lambda y, ct: (ct * refuse(y),))
    report = run(quadratic_problem(None, lower=lower))
    quoted = finding(report, "lower curvature")
    assert quoted.status == "error"
    assert "NotImplementedError: only once differentiable" in quoted.value


def test_samplers_are_told_apart(key):
    data = jax.random.normal(key, (20, SIZE))

    def loss(x, y, batch):
        return jnp.mean((y[None] - batch) ** 2) + jnp.sum((x - y) ** 2)

    def sampled(samples):
        report = run(quadratic_problem(None, lower=loss, lower_samples=samples))
        return report, finding(report, "lower_samples")

    report, found = sampled(aipod.Minibatches(data, 4))
    assert "random, with a known expectation" in found.value
    assert report.hypergradient_error < 1e-6
    report, found = sampled(lambda k: data[:5])
    assert "deterministic" in found.value
    assert found.status == "ok"
    assert report.hypergradient_error < 1e-6
    report, found = sampled(lambda k: data[jax.random.randint(k, (4,), 0, 20)])
    assert found.status == "warning"
    assert "expected()" in found.remedy
    assert report.hypergradient_error is None
    assert "expectations" in finding(report, "hypergradient").value
    assert report.lower_curvature.whole.largest == pytest.approx(2 + 2 / SIZE)


def test_noise_is_a_random_batch_of_known_expectation():
    def lower(x, y, noise):
        return 0.5 * jnp.sum((y - x) ** 2) + noise(x, y)

    report = run(quadratic_problem(None, lower=lower, lower_samples=aipod.Noise(0.1)))
    assert "random, with a known expectation" in finding(report, "lower_samples").value
    assert report.hypergradient_error < 1e-6
    hidden = aipod.Noise(0.1, samples=lambda key: jax.random.normal(key))
    report = run(quadratic_problem(None, lower=lower, lower_samples=hidden))
    assert finding(report, "lower_samples").status == "warning"


def test_float32_is_checked_roughly():
    problem = quadratic_problem(
        np.diag(np.arange(1.0, 7.0)).astype(np.float32), lower_set=aipod.Affine(A_ONE, 6.0)
    )
    start = jnp.linspace(0.5, 1.5, SIZE, dtype=jnp.float32)
    report = run(problem, x=start, y=start)
    assert report.ok
    assert "sharper" in finding(report, "lower gradient").value
    assert "float64" in finding(report, "hypergradient").value
    assert report.lower_curvature.whole.largest == pytest.approx(6.0, rel=1e-4)
    assert report.lower_curvature.kernel.largest < 5.9
    wrong = quadratic_problem(None, lower=lambda x, y, _: wrongly_squared(y) + jnp.sum(x))
    assert finding(run(wrong, x=start, y=start), "lower gradient").status == "error"


def test_a_large_problem_is_not_solved():
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - 1.0) ** 2), lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2)
    )
    report = run(problem, x=jnp.ones(()), y=jnp.ones(1000))
    assert "1000 unknowns" in finding(report, "hypergradient").value
    assert set(report.suggested) == {"lower_lr", "adjoint_lr"}


def test_an_unsolved_lower_level_is_a_finding():
    # Convex, but without a minimiser.
    def lower(x, y, _):
        return jnp.sum(jnp.exp(-y) - y) + jnp.sum(x)

    report = run(quadratic_problem(None, lower=lower))
    assert finding(report, "hypergradient").status == "error"
    assert finding(report, "hypergradient").value.startswith("the lower level was not solved")


def test_a_start_that_is_already_a_solution():
    # Every gradient vanishes at 0, and so do both objectives: relative errors mean nothing there.
    zero = jnp.zeros(SIZE)
    report = run(quadratic_problem(np.eye(SIZE), upper=lambda x, y, _: y @ y), x=zero, y=zero)
    assert report.ok
    goal = jnp.linspace(-1.0, 2.0, SIZE)

    def upper(x, y, _):
        return jnp.sum((y - goal) ** 2) + jnp.sum(jnp.cosh(x - goal))

    report = run(quadratic_problem(np.eye(SIZE), upper=upper), x=goal, y=goal)
    assert report.ok
    assert report.suggested["upper_lr"] == pytest.approx(1 / 3, rel=1e-3)


def test_the_table_shows_every_finding_and_its_remedy():
    G = np.diag([-0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    report = run(quadratic_problem(G, upper_set=aipod.Budget(1.0)))
    text = str(report)
    lines = text.splitlines()
    flat = " ".join(text.split())
    column = lines[0].index("finding")
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "1 error, 1 warning"
    for found in report.findings:
        assert found.value in flat
        assert (found.remedy != "") == (found.status != "ok")
        if found.remedy:
            assert f"-> {found.remedy}" in flat
        (row,) = [line for line in lines if line.startswith(found.name + "  ")]
        assert row[column - 1] == " "
        assert row[column] != " "


def test_the_report_is_frozen():
    _, report = report_of("quadratic")
    with pytest.raises(AttributeError):
        report.findings = ()


def test_mismatch_tells_rounding_from_error():
    def slope_two(step):
        return 2 * 2.0 * step

    options = {"typical": 2.0, "tolerance": 1e-4, "steps": (1e-3, 1e-4)}
    assert mismatch(slope_two, 2.0, rounding=1e-12, **options) < 1e-12
    assert mismatch(slope_two, 1.0, rounding=1e-12, **options) == pytest.approx(0.5)
    assert np.isnan(mismatch(slope_two, 1.9, rounding=1.0, **options))
    assert np.isinf(mismatch(lambda step: float("nan"), 1.0, rounding=0.0, **options))


def test_a_sampler_that_draws_without_its_key_is_an_error():
    """In the compiled step it would give the same batch for ever."""
    rng = np.random.default_rng(0)
    data = jnp.arange(20.0)

    def frozen(key):
        return data[rng.integers(0, 20, 4)]

    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - x) ** 2),
        lambda x, y, batch: 0.5 * jnp.sum((y - x) ** 2) + jnp.mean(batch) * jnp.sum(y),
        lower_samples=frozen,
    )
    report = check(problem, jnp.zeros(2), jnp.zeros(2), key=jax.random.key(0))
    assert not report.ok
    assert "another batch when it is called again with the same key" in str(report)
    sound = dataclasses.replace(problem, lower_samples=aipod.Minibatches(data, 4))
    assert check(sound, jnp.zeros(2), jnp.zeros(2), key=jax.random.key(0)).ok
