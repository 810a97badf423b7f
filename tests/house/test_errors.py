"""Bad input raises a ValueError that names the argument and the remedy, before compilation."""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import aipod

NAN = float("nan")
ONES = np.ones((2, 3))
Y = jnp.zeros(3)
PAIR = {"a": jax.ShapeDtypeStruct((2, 2), float), "b": jax.ShapeDtypeStruct((1,), float)}
SUMS = lx.FunctionLinearOperator(lambda y: {"s": jnp.sum(y["a"], axis=1), "t": y["b"]}, PAIR)


def scalar(x, y, _):
    return jnp.sum(x * y)


def bilevel(**changes):
    return aipod.Bilevel(**({"upper": scalar, "lower": scalar} | changes))


def with_nan(matrix):
    return np.where(np.arange(matrix.size).reshape(matrix.shape) == 1, np.nan, matrix)


def in_jit(make, *traced):
    return jax.jit(lambda *args: make(*args).project(Y))(*traced)


class Bad(NamedTuple):
    name: str
    act: object
    message: str


AFFINE = [
    Bad("A-type", lambda: aipod.Affine("matrix"), r"A must be a matrix.*got str"),
    Bad("A-none", lambda: aipod.Affine(None), r"A must be a matrix.*got NoneType"),
    Bad("A-vector", lambda: aipod.Affine(np.ones(3)), r"A must be a matrix .*\(3,\)"),
    Bad("A-stack", lambda: aipod.Affine(np.ones((1, 2, 3))), r"A must be a matrix .*\(1, 2, 3\)"),
    Bad("A-words", lambda: aipod.Affine(np.array([["a"]])), r"A must hold real numbers"),
    Bad("A-complex", lambda: aipod.Affine(ONES + 1j), r"A must hold real numbers.*complex"),
    Bad(
        "A-complex-sparse",
        lambda: aipod.Affine(scipy.sparse.csr_array(ONES + 1j)),
        r"A must hold real numbers.*complex",
    ),
    Bad("A-nan", lambda: aipod.Affine(with_nan(ONES)), r"A holds NaN.*clean it"),
    Bad("A-infinite", lambda: aipod.Affine(ONES * np.inf), r"A holds NaN or infinity.*clean it"),
    Bad(
        "A-nan-scipy",
        lambda: aipod.Affine(scipy.sparse.csr_array(with_nan(ONES))),
        r"A holds NaN.*clean it",
    ),
    Bad(
        "A-nan-bcoo",
        lambda: aipod.Affine(BCOO.fromdense(jnp.asarray(with_nan(ONES)))),
        r"A holds NaN.*clean it",
    ),
    Bad(
        "A-nan-operator",
        lambda: aipod.Affine(lx.MatrixLinearOperator(jnp.asarray(with_nan(ONES)))),
        r"A holds NaN.*clean it",
    ),
    Bad("c-nan", lambda: aipod.Affine(ONES, np.array([0.0, NAN])), r"c holds NaN.*clean it"),
    Bad("c-nan-number", lambda: aipod.Affine(ONES, NAN), r"c holds NaN.*clean it"),
    Bad("c-shape", lambda: aipod.Affine(ONES, np.ones(3)), r"c has shape \(3,\).*A has 2 rows"),
    Bad("c-column", lambda: aipod.Affine(ONES, np.ones((2, 1))), r"c has shape \(2, 1\).*\(2,\)"),
    Bad("c-words", lambda: aipod.Affine(ONES, "one"), r"\bc\b"),
    Bad("c-none", lambda: aipod.Affine(ONES, None), r"\bc\b.*(number|NoneType)"),
    Bad("c-structure", lambda: aipod.Affine(SUMS, {"s": np.ones(2)}), r"c does not have.*operator"),
    Bad(
        "c-shape-operator",
        lambda: aipod.Affine(SUMS, {"s": np.ones(3), "t": np.ones(1)}),
        r"\bc\b.*operator A",
    ),
    Bad(
        "empty",
        lambda: aipod.Affine(ONES, np.array([0.0, 3.0])),
        r"is empty.*misses by 1\.5\).*rows of A that repeat",
    ),
    Bad(
        "empty-zero-row",
        lambda: aipod.Affine(np.zeros((1, 3)), 0.25),
        r"is empty.*misses by 0\.25\).*range of A",
    ),
    Bad(
        "empty-scipy",
        # The residual belongs to A as it was given, whatever happens to its rows inside.
        lambda: aipod.Affine(scipy.sparse.csr_array(ONES), np.array([0.0, 3.0])),
        r"is empty.*misses by 1\.5\).*rows of A that repeat",
    ),
    Bad(
        "empty-operator",
        lambda: aipod.Affine(lx.MatrixLinearOperator(jnp.asarray(ONES)), np.array([0.0, 3.0])),
        r"is empty.*misses by 1\.5\).*rows of A that repeat",
    ),
    Bad(
        "empty-at-x",
        lambda: bilevel(
            lower_set=aipod.Affine(ONES, 0.0, coupling=lambda x: jnp.stack([x[0], 3 + x[0]]))
        ).check(Y, Y),
        r"lower_set at the given x is empty.*misses by 1\.5\)",
    ),
    Bad(
        "point-size",
        lambda: aipod.Affine(ONES).project(jnp.zeros(4)),
        r"point has 4 entries.*A has 3 columns",
    ),
    Bad(
        "point-tree-size",
        lambda: aipod.Affine(ONES).tangent({"a": jnp.zeros((2, 2)), "b": jnp.zeros(1)}),
        r"point has 5 entries.*\(2, 2\).*A has 3 columns",
    ),
    Bad(
        "point-structure",
        lambda: aipod.Affine(SUMS, coupling=lambda x: x).tangent({"a": jnp.zeros((2, 2))}),
        r"point does not have the structure.*operator A",
    ),
    Bad(
        "point-shape-operator",
        lambda: aipod.Affine(SUMS, coupling=lambda x: x).tangent(
            {"a": jnp.zeros((2, 3)), "b": jnp.zeros(1)}
        ),
        r"point.*operator A",
    ),
    Bad(
        "coupling-number",
        lambda: aipod.Affine(ONES, coupling=3.0),
        r"coupling must be a function h\(x\) or a matrix",
    ),
    Bad(
        "coupling-vector",
        lambda: aipod.Affine(ONES, coupling=np.ones(2)),
        r"coupling must be a function h\(x\) or a matrix.*\(2,\)",
    ),
    Bad(
        "coupling-nan",
        lambda: aipod.Affine(ONES, coupling=with_nan(np.ones((2, 4)))),
        r"coupling holds NaN",
    ),
    Bad(
        "coupling-rows",
        lambda: aipod.Affine(ONES, coupling=np.ones((3, 4))).project(Y, jnp.zeros(4)),
        r"coupling h\(x\) has shape \(3,\).*c has shape \(2,\).*each row of A",
    ),
    Bad(
        "coupling-rows-scipy",
        lambda: aipod.Affine(scipy.sparse.csr_array(ONES), coupling=jnp.sin).project(Y, Y),
        r"coupling h\(x\) has shape \(3,\).*c has shape \(2,\).*each row of A",
    ),
    Bad(
        "coupling-columns",
        lambda: bilevel(lower_set=aipod.Affine(ONES, coupling=np.ones((2, 4)))).check(Y, Y),
        r"coupling.*\(2, 4\).*x.*3",
    ),
    Bad(
        "missing-x",
        lambda: aipod.Affine(ONES, coupling=lambda x: x).project(Y),
        r"moves with x.*pass x",
    ),
    Bad("in-jit", lambda: in_jit(aipod.Affine, ONES), r"Affine was made inside jit.*make.*outside"),
    Bad(
        "in-jit-constant",
        lambda: in_jit(lambda: aipod.Affine(ONES)),
        r"Affine was made inside jit.*make.*outside",
    ),
]

OTHER_SETS = [
    Bad("budget-total", lambda: aipod.Budget(np.ones(2)), r"total must be one number.*\(2,\)"),
    Bad("budget-total-nan", lambda: aipod.Budget(NAN), r"total.*NaN"),
    Bad("budget-total-type", lambda: aipod.Budget("all"), r"total must be one number"),
    Bad("budget-nan", lambda: aipod.Budget(1.0, np.array([1, NAN])), r"weights.*NaN"),
    Bad("budget-zero", lambda: aipod.Budget(1.0, np.zeros(3)), r"weights must not all be 0"),
    Bad("budget-like", lambda: aipod.Budget(1.0).anchor(), r"shape of y: pass like=y"),
    Bad(
        "budget-shape",
        lambda: bilevel(lower_set=aipod.Budget(1.0, np.ones(4))).check(Y, Y),
        r"lower_set is a Budget with weights of shape \(4,\).*\(3,\).*one weight.*each entry",
    ),
    Bad("budget-coupling", lambda: aipod.Budget(1.0, coupling=3.0), r"coupling must be a function"),
    Bad(
        "budget-coupling-shape",
        lambda: bilevel(lower_set=aipod.Budget(1.0, coupling=jnp.sin)).check(Y, Y),
        r"coupling.*\(3,\).*(one value|one number)",
    ),
    Bad(
        "budget-missing-x",
        lambda: aipod.Budget(1.0, coupling=lambda x: jnp.sum(x)).project(Y),
        r"moves with x.*pass x",
    ),
    Bad("budget-in-jit", lambda: in_jit(aipod.Budget, 1.0), r"Budget was made inside jit.*outside"),
    Bad("consensus-zero", lambda: aipod.Consensus([1.0, 0.0]), r"weights must.*positive.*leave a"),
    Bad("consensus-nan", lambda: aipod.Consensus([1.0, NAN]), r"weights must.*positive"),
    Bad("consensus-infinite", lambda: aipod.Consensus([1.0, np.inf]), r"weights must.*positive"),
    Bad("consensus-matrix", lambda: aipod.Consensus(np.ones((2, 2))), r"weights must be a vector"),
    Bad(
        "consensus-clients",
        lambda: bilevel(lower_set=aipod.Consensus([1.0, 2.0])).check(Y, Y),
        r"lower_set is Consensus for 2 weights.*client axis.*\(3,\)",
    ),
    Bad(
        "consensus-uneven",
        lambda: aipod.Consensus().check({"a": jnp.zeros((2, 1)), "b": jnp.zeros((3, 1))}),
        r"Consensus.*leading axis.*one length.*\(2, 1\), \(3, 1\)",
    ),
    Bad(
        "consensus-number",
        lambda: aipod.Consensus().check(jnp.zeros(())),
        r"Consensus.*leading axis of every leaf must be the client axis",
    ),
    Bad(
        "consensus-in-jit",
        lambda: in_jit(aipod.Consensus, jnp.ones(3)),
        r"Consensus was made inside jit.*outside",
    ),
    Bad("flow-float", lambda: aipod.Flow([0.0], [1.0], [0, 0]), r"senders and receivers.*integer"),
    Bad(
        "flow-length", lambda: aipod.Flow([0], [1, 2], [0, 0, 0]), r"one length.*\(1,\) and \(2,\)"
    ),
    Bad("flow-node", lambda: aipod.Flow([0], [2], [0, 0]), r"must name nodes 0 to 1"),
    Bad("flow-negative", lambda: aipod.Flow([-1], [1], [0, 0]), r"must name nodes 0 to 1"),
    Bad("flow-demand", lambda: aipod.Flow([0], [1], 0.0), r"demand must have shape.*\(nodes,\)"),
    Bad("flow-nan", lambda: aipod.Flow([0], [1], [0.0, NAN]), r"demand holds NaN"),
    Bad(
        "flow-unbalanced",
        lambda: aipod.Flow([0], [1], [0.0, 1.0]),
        r"Flow.*does each demand sum to zero.*empty.*misses by 0\.5\)",
    ),
    Bad(
        "flow-unreachable",
        # Demand and supply in two parts of the graph that no edge joins.
        lambda: aipod.Flow([0], [1], [0.0, -1.0, 1.0]),
        r"Flow.*empty.*misses by 1\)",
    ),
    Bad(
        "flow-point",
        lambda: aipod.Flow([0, 0], [1, 1], [[0, 0]] * 3).project(jnp.zeros((2, 3))),
        r"flow on this graph is one array of shape \(3, 2\).*\(2, 3\)",
    ),
    Bad(
        "flow-coupling",
        lambda: aipod.Flow([0], [1], [0, 0], coupling=lambda x: x).project(jnp.zeros(1), Y),
        r"coupling h\(x\) has shape \(3,\).*\(2,\)",
    ),
    Bad("product-empty", lambda: aipod.Product({}), r"Product takes at least one set"),
    Bad("product-type", lambda: aipod.Product({"a": 1.0}), r"Product takes.*set for each part"),
    Bad(
        "product-keys",
        lambda: aipod.Product({"a": aipod.Free()}).project({"a": Y, "b": Y}),
        r"Product over \['a'\] got \['a', 'b'\].*aipod\.Free\(\)",
    ),
    Bad(
        "product-container",
        lambda: aipod.Product({"a": aipod.Free()}).project((Y,)),
        r"Product over \['a'\] got tuple",
    ),
    Bad(
        "product-length",
        lambda: aipod.Product((aipod.Free(), aipod.Free())).project((Y,)),
        r"Product of 2 sets needs a list or tuple of as many parts",
    ),
    Bad(
        "product-part",
        lambda: bilevel(
            lower_set=aipod.Product({"a": aipod.Consensus([1.0, 2.0]), "b": aipod.Free()})
        ).check(Y, {"a": Y, "b": Y}),
        r"part of lower_set is Consensus for 2 weights",
    ),
]

SAMPLING = [
    Bad("batch-zero", lambda: aipod.Minibatches(ONES, 0), r"batch_size must be.*at least 1"),
    Bad("batch-fraction", lambda: aipod.Minibatches(ONES, 1.5), r"batch_size.*1\.5"),
    Bad("batch-type", lambda: aipod.Minibatches(ONES, "all"), r"batch_size.*all"),
    Bad(
        "batch-too-large",
        lambda: aipod.Minibatches(ONES, 3, replace=False),
        r"batch_size is 3, but data holds 2 examples.*replace=True.*FullBatch",
    ),
    Bad(
        "data-lengths",
        lambda: aipod.Minibatches((np.ones(2), np.ones(3)), 1),
        r"Minibatches.*data.*leading axis.*\(2,\), \(3,\)",
    ),
    Bad("data-number", lambda: aipod.Minibatches(1.0, 1), r"Minibatches.*data.*leading axis"),
    Bad("data-none", lambda: aipod.Minibatches((), 1), r"Minibatches.*data"),
    Bad("data-no-example", lambda: aipod.Minibatches(np.ones((0, 2)), 1), r"data holds no example"),
    Bad(
        "data-nan",
        lambda: aipod.Minibatches(with_nan(ONES), 1),
        r"Minibatches: data holds NaN.*remove or impute",
    ),
    Bad(
        "data-nan-full",
        lambda: aipod.FullBatch({"a": with_nan(ONES)}),
        r"FullBatch: data holds NaN.*remove or impute",
    ),
    Bad("full-no-example", lambda: aipod.FullBatch(np.ones((0, 2))), r"data holds no example"),
    Bad("noise-negative", lambda: aipod.Noise(-1.0), r"scale must be 0 or more.*-1"),
    Bad("noise-nan", lambda: aipod.Noise(NAN), r"scale must be 0 or more"),
    Bad("noise-infinite", lambda: aipod.Noise(np.inf), r"scale must be"),
]

PROBLEM = [
    Bad("upper-type", lambda: bilevel(upper=1.0), r"upper must be a function \(x, y, batch\)"),
    Bad("lower-type", lambda: bilevel(lower=None), r"lower must be a function \(x, y, batch\)"),
    Bad("set-type", lambda: bilevel(lower_set=ONES), r"lower_set must be a set.*aipod\.Affine"),
    Bad("set-class", lambda: bilevel(upper_set=aipod.Free), r"upper_set must be a set.*Free\(\)"),
    Bad(
        "samples-type",
        lambda: bilevel(lower_samples=ONES),
        r"lower_samples must be a callable key -> batch.*aipod\.Minibatches.*ndarray",
    ),
    Bad(
        "upper-coupling",
        lambda: bilevel(upper_set=aipod.Affine(ONES, coupling=lambda x: x)),
        r"upper_set has a coupling.*leave the coupling out",
    ),
    Bad(
        "upper-coupling-product",
        lambda: bilevel(
            upper_set=aipod.Product({"a": aipod.Budget(1.0, coupling=lambda x: jnp.sum(x))})
        ),
        r"upper_set has a coupling.*leave the coupling out",
    ),
    Bad(
        "x-integer",
        lambda: bilevel().check(jnp.arange(3), Y),
        r"x0 must hold real floating-point.*int.*jnp\.asarray\(x0, float\)",
    ),
    Bad(
        "y-integer",
        lambda: bilevel().check(Y, {"a": Y, "b": 1}),
        r"y0 must hold real floating-point.*int.*jnp\.asarray\(y0, float\)",
    ),
    Bad("x-complex", lambda: bilevel().check(Y + 1j, Y), r"x0 must hold real floating-point"),
    Bad(
        "x-shape",
        lambda: bilevel(upper_set=aipod.Affine(ONES)).check(jnp.zeros(4), jnp.zeros(4)),
        r"point has 4 entries.*A has 3 columns",
    ),
    Bad(
        "upper-not-scalar",
        lambda: bilevel(upper=lambda x, y, _: x * y).check(Y, Y),
        r"upper must return a scalar.*shape \(3,\).*jnp\.sum",
    ),
    Bad(
        "lower-not-array",
        lambda: bilevel(lower=lambda x, y, _: (jnp.sum(x), y)).check(Y, Y),
        r"lower must return a scalar.*tuple",
    ),
    Bad(
        "lower-not-scalar-in-use",
        lambda: aipod.exact_lower(bilevel(lower=lambda x, y, _: (y - x) ** 2), Y, Y),
        r"lower must return a scalar.*jnp\.sum",
    ),
    Bad(
        "shape-of-y",
        lambda: aipod.exact_lower(bilevel(lower_set=aipod.Consensus()), Y),
        r"shape of y cannot be told from a Consensus.*y0=",
    ),
    Bad(
        "shape-of-y-free",
        lambda: aipod.stationarity(bilevel(), Y),
        r"shape of y cannot be told from a Free.*y0=",
    ),
    Bad(
        "no-expectation",
        lambda: aipod.hypergradient(bilevel(lower_samples=lambda key: key), Y, Y),
        r"exact values need the expectation.*aipod\.FullBatch.*expected\(\)",
    ),
    Bad(
        "no-expectation-inside-noise",
        lambda: aipod.exact_lower(bilevel(lower_samples=aipod.Noise(0.1, lambda key: key)), Y, Y),
        r"exact values need the expectation.*expected\(\)",
    ),
]

ADJOINT = [
    Bad("neumann-steps", lambda: aipod.Neumann(0), r"adjoint_steps.*at least 1.*0"),
    Bad("neumann-fraction", lambda: aipod.Neumann(2.5), r"adjoint_steps.*2\.5"),
    Bad("lr-negative", lambda: aipod.Neumann(lr=-0.1), r"adjoint_lr must be positive.*-0\.1"),
    Bad("lr-zero", lambda: aipod.Neumann(lr=0), r"adjoint_lr must be positive"),
    Bad("lr-nan", lambda: aipod.Neumann(lr=NAN), r"adjoint_lr must be positive"),
    Bad("lr-infinite", lambda: aipod.Neumann(lr=np.inf), r"adjoint_lr must be"),
    Bad("lr-array", lambda: aipod.Neumann(lr=jnp.ones(2)), r"adjoint_lr must be a number"),
    Bad("lr-words", lambda: aipod.Neumann(lr="fast"), r"adjoint_lr must be a number.*Curvature"),
    Bad("lr-bool", lambda: aipod.Neumann(lr=True), r"adjoint_lr must be a number.*bool"),
    Bad("damping-neumann", lambda: aipod.Neumann(damping=-1.0), r"damping must be 0 or more"),
    Bad("damping-direct", lambda: aipod.Direct(damping=-1.0), r"damping must be 0 or more"),
    Bad("damping-nan", lambda: aipod.Direct(damping=NAN), r"damping must be 0 or more"),
    Bad("damping-cg", lambda: aipod.ConjugateGradient(damping=-1.0), r"damping must be 0 or more"),
    Bad("rtol", lambda: aipod.ConjugateGradient(rtol=-1.0), r"rtol and atol must be 0 or more"),
    Bad("atol", lambda: aipod.ConjugateGradient(atol=NAN), r"rtol and atol must be 0 or more"),
    Bad("max-steps", lambda: aipod.ConjugateGradient(max_steps=0), r"max_steps.*at least 1"),
    Bad("curvature-safety", lambda: aipod.Curvature(safety=0.0), r"safety must be positive"),
    Bad("curvature-cap", lambda: aipod.Curvature(cap=-1.0), r"cap must be positive"),
    Bad("curvature-iterations", lambda: aipod.Curvature(iterations=0), r"iterations.*at least 1"),
]


@pytest.fixture
def nothing_compiles(monkeypatch):
    """The compiled programs replaced by a failure: whoever reaches them checked too late."""
    exact = importlib.import_module("aipod._hypergradient._exact")
    estimate = importlib.import_module("aipod._hypergradient._estimate")

    def too_late(*args):
        pytest.fail("the input was not checked before compilation")

    monkeypatch.setattr(exact, "_newton", too_late)
    monkeypatch.setattr(estimate, "_hypergradient", too_late)


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    "bad", [*AFFINE, *OTHER_SETS, *SAMPLING, *PROBLEM, *ADJOINT], ids=lambda bad: bad.name
)
def test_bad_input_names_the_argument_and_the_remedy(bad):
    with pytest.raises(ValueError, match=bad.message):
        bad.act()


def test_the_good_neighbours_of_the_bad_input_pass():
    bilevel(lower_set=aipod.Budget(1.0, np.ones(3))).check(Y, Y)
    bilevel(lower_set=aipod.Affine(ONES, coupling=np.ones((2, 3)))).check(Y, Y)
    bilevel(upper_set=aipod.Affine(ONES, 1.0), lower_set=aipod.Consensus([1, 2, 3])).check(Y, Y)
    aipod.Affine(SUMS, {"s": np.ones(2), "t": np.ones(1)})
    aipod.Flow([0, 1], [1, 0], [0, 0])
    aipod.Neumann(1, lr=np.float32(0.1))
    aipod.Neumann(1, lr=lambda step: 0.1 / (1 + step), damping=0)
    aipod.ConjugateGradient(rtol=0.0, atol=0.0)
    aipod.Minibatches(ONES, np.int64(2), replace=False)
    aipod.Noise(0)
