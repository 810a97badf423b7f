"""Odd inputs: a sentence with a remedy before anything is compiled, or the right answer."""

import fractions
import operator
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import aipod

KEY = jax.random.key(0)
ONES = np.ones((2, 3))
Y = jnp.zeros(3)
ROWS = jnp.arange(6.0).reshape(2, 3)
MASKED = np.ma.array([1.0, 1.0, 1.0], mask=[False, True, False])
BIG = 10**400


class Pair(NamedTuple):
    a: object
    b: object


def consensus(weights):
    return lambda: aipod.Consensus(weights)


def share(participation):
    return lambda: aipod.Consensus(participation=participation)


def budget(total, weights=None, coupling=None):
    return lambda: aipod.Budget(total, weights, coupling)


def affine(A, c=0.0, coupling=None):
    return lambda: aipod.Affine(A, c, coupling)


def flow(senders, receivers, demand):
    return lambda: aipod.Flow(senders, receivers, demand)


def coupled(h):
    """A set with a coupling, checked as `solve` does."""
    return lambda: aipod.Affine(ONES, coupling=h).check(Y, Y, name="lower_set")


def spent(h):
    return lambda: aipod.Budget(1.0, coupling=h).check(Y, Y, name="lower_set")


def narrow(act):
    """In single precision, as users have it."""

    def run():
        jax.config.update("jax_enable_x64", False)
        try:
            return act()
        finally:
            jax.config.update("jax_enable_x64", True)

    return run


REAL = "must be a number or an array of real numbers, got"
SHARE = r"participation must be a share of the clients in \(0, 1\], got"
NODES = "senders and receivers must be two integer vectors"

REFUSED = {
    # What Consensus is made from.
    "weights-empty": (consensus([]), "weights must be a vector with one positive number"),
    "weights-text": (consensus("ab"), f"weights {REAL} str"),
    "weights-texts": (consensus(["1", "2"]), f"weights {REAL} list"),
    "weights-dict": (consensus({"a": 1.0}), f"weights {REAL} dict"),
    "weights-none": (consensus([1.0, None]), f"weights {REAL} list"),
    "weights-complex": (consensus([1j, 1.0]), f"weights {REAL} list"),
    "weights-ragged": (consensus([[1.0], [1.0, 2.0]]), f"weights {REAL} list"),
    "weights-set": (consensus({1.0, 2.0}), f"weights {REAL} set"),
    "weights-key": (consensus(KEY), f"weights {REAL} PRNGKeyArray"),
    "weights-masked": (consensus(MASKED), "weights has masked entries.*filled"),
    "weights-number": (consensus(3.0), "weights must be a vector"),
    "weights-negative": (consensus([1.0, -1.0]), "positive.*leave a client out"),
    "weights-overflow": (consensus([1e308, 1e308]), "weights divided by their sum do not fit"),
    "weights-vanish": (consensus([1e-320, 1.0]), "weights divided by their sum do not fit"),
    "weights-single": (narrow(consensus([1e39, 1.0])), "weights holds numbers beyond.*jax_enable"),
    "share-text": (share("0.5"), f"{SHARE} '0.5'"),
    "share-nan": (share(float("nan")), f"{SHARE} nan"),
    "share-true": (share(True), f"{SHARE} True"),
    "share-bool": (share(np.bool_(True)), SHARE),
    "share-none": (share(None), f"{SHARE} None"),
    "share-array": (share(np.array([0.5, 0.5])), SHARE),
    "share-vector": (share(np.array([0.5])), SHARE),
    "share-list": (share([0.5]), SHARE),
    "share-complex": (share(0.5 + 0j), SHARE),
    "share-infinite": (share(float("inf")), SHARE),
    "share-key": (share(KEY), SHARE),
    # Points that do not fit it.
    "clients-number": (lambda: aipod.Consensus().project(jnp.array(1.0)), "client axis"),
    "clients-text": (lambda: aipod.Consensus().project("ab"), "client axis"),
    "clients-project": (lambda: aipod.Consensus([1.0]).project(ROWS), "for 1 weights.*client axis"),
    "clients-cotangent": (lambda: aipod.Consensus([1.0]).cotangent(ROWS), "for 1 weights"),
    "clients-riesz": (lambda: aipod.Consensus([1.0]).riesz(ROWS), "for 1 weights"),
    "clients-round": (
        lambda: aipod.Consensus([1.0, 2.0, 3.0], 0.7).for_round(KEY).project(ROWS),
        "for 3 weights",
    ),
    "clients-bytes": (lambda: aipod.Consensus().message_size(jnp.array(1.0)), "client axis"),
    "clients-none": (lambda: aipod.Consensus().check({}), "holds no clients"),
    "clients-zero": (lambda: aipod.Consensus().check(jnp.zeros((0, 3))), "holds no clients"),
    # Budget.
    "total-none": (budget(None), "total must be one number, got NoneType"),
    "total-complex": (budget(1j), "total must be one number, got complex"),
    "total-true": (budget(True), "total must be one number, got bool"),
    "total-array-true": (budget(np.array(True)), "total must be one number"),
    "total-long": (budget(BIG), "total holds NaN or infinity"),
    "total-key": (budget(KEY), "total must be"),
    "total-masked": (budget(np.ma.masked), "total has masked entries"),
    "total-single": (narrow(budget(1e300)), "total holds numbers beyond.*rescale"),
    "budget-none": (budget(1.0, [1.0, None, 2.0]), f"weights {REAL} NoneType"),
    "budget-text": (budget(1.0, ["a", "b", "c"]), f"weights {REAL} str"),
    "budget-key": (budget(1.0, KEY), f"weights {REAL} PRNGKeyArray"),
    "budget-masked": (budget(1.0, MASKED), "weights has masked entries"),
    "budget-tiny": (budget(1.0, np.full(3, 1e-200)), "weights reach 1e-200.*multiply weights"),
    "budget-huge": (budget(1.0, np.full(3, 1e200)), r"weights reach 1e\+200.*multiply weights"),
    "budget-single": (narrow(budget(1.0, np.full(3, 1e-25))), "weights reach 1e-25"),
    "budget-project": (
        lambda: aipod.Budget(1.0, np.ones(4)).project(Y),
        r"weights of shape \(4,\).*one weight is needed for each entry",
    ),
    "budget-tangent": (lambda: aipod.Budget(1.0, np.ones(4)).tangent(Y), "one weight is needed"),
    "budget-anchor": (lambda: aipod.Budget(1.0, np.ones(4)).anchor(like=Y), "one weight is needed"),
    "budget-residual": (lambda: aipod.Budget(1.0, np.ones(4)).residual(Y), "one weight is needed"),
    "budget-list": (
        lambda: aipod.Budget(1.0, [1.0, 2.0, 3.0]).project(Y),
        "structure of the point",
    ),
    "budget-empty": (lambda: aipod.Budget(1.0).check(jnp.zeros(0)), "no entries to share it"),
    "spent-nothing": (lambda: aipod.Budget(1.0, coupling=jnp.sum).check(Y), "pass x"),
    "spent-raises": (spent(lambda x: x["q"]), "lower_set: the coupling must be.*raised"),
    "spent-none": (spent(lambda x: None), "must return one number"),
    "spent-text": (spent(lambda x: "a"), "must be a function of x alone"),
    "spent-nan": (spent(lambda x: jnp.sum(x) / 0), "lower_set.*is NaN or infinite at the given x"),
    "spent-complex": (spent(lambda x: jnp.sum(x) + 1j), "is not real"),
    "spent-arguments": (spent(lambda x, y: jnp.sum(x)), "must be a function of x alone"),
    "spent-branches": (spent(lambda x: 1.0 if x[0] > 0 else 0.0), "that jax.jit can trace"),
    # Affine.
    "A-ragged": (affine([[1.0], [1.0, 2.0]]), "rows of one length"),
    "A-none": (affine([[1.0, None]]), "A must hold real numbers, got dtype object"),
    "A-key": (affine(KEY), "A must be a matrix"),
    "A-dates": (affine(np.array([["2020-01-01"]], "M8[D]")), "A must hold real numbers"),
    "A-masked": (affine(np.ma.array(ONES, mask=ONES > 0)), "A has masked entries"),
    "A-tiny": (affine([[1e-320, 0.0]]), "A is so small that its inverse.*multiply A"),
    "A-tiny-single": (narrow(affine([[1e-42, 0.0]])), "A is so small"),
    "A-tiny-sparse": (
        narrow(affine(scipy.sparse.csr_array([[1e-42, 0.0]]))),
        "A is so small",
    ),
    "A-single": (narrow(affine([[1e39, 1.0]])), "A holds numbers beyond.*float32"),
    "A-single-array": (affine(jnp.ones((1, 2), jnp.float32), 1e39), "c holds numbers beyond"),
    "A-long-rows": (narrow(affine(scipy.sparse.csr_array([[3e38, 3e38]]))), "A holds numbers"),
    "A-sparse-vector": (affine(scipy.sparse.coo_array(np.ones(2))), r"matrix \(two axes\)"),
    "A-bcoo-vector": (affine(BCOO.fromdense(jnp.ones(2))), r"matrix \(two axes\)"),
    "A-bcoo-dense": (affine(BCOO.fromdense(jnp.ones((1, 2)), n_dense=1)), "two sparse axes"),
    "A-operator-half": (
        affine(lx.MatrixLinearOperator(jnp.ones((1, 2), jnp.float16))),
        "operator on float64, got float16: convert",
    ),
    "A-operator-single": (
        affine(lx.MatrixLinearOperator(jnp.ones((1, 2), jnp.float32))),
        "operator on float64, got float32: convert",
    ),
    "A-operator-complex": (
        affine(lx.MatrixLinearOperator(jnp.ones((1, 2), complex))),
        "operator on float64, got complex128",
    ),
    "c-key": (affine(ONES, KEY), f"c {REAL} PRNGKeyArray"),
    "c-masked": (affine(ONES, MASKED[:2]), "c has masked entries"),
    "c-long": (affine(ONES, BIG), f"c {REAL} int"),
    "c-none": (affine(ONES, [1.0, None]), f"c {REAL} list"),
    "c-ragged": (affine(ONES, [[1.0], [1.0, 2.0]]), f"c {REAL} list"),
    "H-text": (affine(ONES, coupling="h"), "coupling must be a function.*got str"),
    "H-dict": (affine(ONES, coupling={}), "coupling must be a function.*got dict"),
    "H-complex": (affine(ONES, coupling=ONES + 1j), f"coupling {REAL}"),
    "H-ragged": (affine(ONES, coupling=[[1.0], [1.0, 2.0]]), f"coupling {REAL} list"),
    "H-none": (affine(ONES, coupling=[[1.0, None, 1.0]] * 2), f"coupling {REAL} list"),
    "H-sparse": (affine(ONES, coupling=scipy.sparse.csr_array(ONES)), "coupling must be"),
    "H-operator": (
        affine(ONES, coupling=lx.MatrixLinearOperator(jnp.asarray(ONES))),
        "coupling must be a function.*got MatrixLinearOperator",
    ),
    "H-columns": (
        lambda: aipod.Affine(ONES, coupling=np.ones((2, 4))).project(Y, Y),
        "x has 3 entries: one column",
    ),
    "H-columns-anchor": (
        lambda: aipod.Affine(ONES, coupling=np.ones((2, 4))).anchor(Y),
        "x has 3 entries: one column",
    ),
    "h-raises": (coupled(operator.itemgetter("q")), "lower_set: the coupling must be.*raised"),
    "h-none": (coupled(lambda x: None), r"coupling h\(x\) has shape \(0,\)"),
    "h-nan": (coupled(lambda x: x[:2] / 0), "is NaN or infinite at the given x"),
    "h-complex": (coupled(lambda x: x[:2] + 1j), "is not real"),
    "h-arguments": (coupled(lambda: Y[:2]), "must be a function of x alone"),
    "h-branches": (coupled(lambda x: x[:2] if x[0] > 0 else -x[:2]), "that jax.jit can trace"),
    "point-text": (lambda: aipod.Affine([[1.0]]).project("a"), "point must hold arrays.*got str"),
    # Flow.
    "flow-text": (flow([0], [1], "ab"), f"demand {REAL} str"),
    "flow-none": (flow([0], [1], None), f"demand {REAL} NoneType"),
    "flow-complex": (flow([0], [1], [1j, -1j]), f"demand {REAL} list"),
    "flow-dict": (flow([0], [1], {"a": 0.0}), f"demand {REAL} dict"),
    "flow-key": (flow([0], [1], KEY), f"demand {REAL} PRNGKeyArray"),
    "flow-no-nodes": (flow([], [], []), r"demand must have shape \(nodes,\)"),
    "flow-no-commodity": (flow([0], [1], np.zeros((0, 2))), "demand must have shape"),
    "flow-receivers": (flow([0], [1.5], [0.0, 0.0, 0.0]), f"{NODES}.*receivers.*float64"),
    "flow-receivers-text": (flow([0], ["1"], [0.0, 0.0]), f"receivers {REAL} list"),
    "flow-ragged": (flow([[0], [1, 2]], [0, 1], [0.0, 0.0]), f"senders {REAL} list"),
    "flow-bools": (flow([True], [False], [0.0, 0.0]), f"{NODES}.*senders.*bool"),
    "flow-masked": (flow(np.ma.array([0, 1], mask=[0, 1]), [1, 2], np.zeros(3)), "masked entries"),
    "flow-single": (narrow(flow([0], [1], [1e39, -1e39])), "demand holds numbers beyond"),
    # Product.
    "product-number": (lambda: aipod.Product(5), "at least one set for each part"),
    "product-none": (lambda: aipod.Product(None), "at least one set for each part"),
    "product-set": (lambda: aipod.Product(aipod.Free()), "at least one set for each part"),
    "product-nested": (lambda: aipod.Product([[aipod.Free()]]), "container itself takes a Product"),
    "product-keys": (
        lambda: aipod.Product({"a": aipod.Free(), 1: aipod.Free()}),
        "keys of a Product must be of one type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")
def test_it_is_refused_with_a_sentence(name):
    act, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        act()


HALF = jnp.bfloat16

ACCEPTED = {
    "share-fraction": (lambda: share(fractions.Fraction(1, 2))().participation, 0.5),
    "share-single": (lambda: share(np.float32(0.5))().participation, 0.5),
    "share-array": (lambda: share(jnp.array(0.5))().participation, 0.5),
    "share-one": (lambda: share(1)().participation, 1.0),
    "weights-integers": (lambda: aipod.Consensus([1, 2]).weights, [1 / 3, 2 / 3]),
    "weights-half": (lambda: aipod.Consensus(jnp.array([1, 3], HALF)).weights, [0.25, 0.75]),
    "weights-range": (lambda: aipod.Consensus(range(1, 3)).weights, [1 / 3, 2 / 3]),
    "numpy-point": (
        lambda: aipod.Consensus([1.0, 1.0]).project(np.asarray(ROWS))[0],
        [1.5, 2.5, 3.5],
    ),
    "total-fraction": (lambda: aipod.Budget(fractions.Fraction(1, 2)).residual(Y), -0.5),
    "budget-half": (lambda: aipod.Budget(3.0, jnp.ones(3, HALF)).project(Y), [1.0, 1.0, 1.0]),
    "budget-number": (lambda: aipod.Budget(1.0).project(0.5), 1.0),
    "spent-dict": (
        lambda: aipod.Budget(0.0, coupling=lambda x: {"a": jnp.sum(x)}).project(Y, Y - 1.0),
        [1.0, 1.0, 1.0],
    ),
    "spent-vector": (
        lambda: aipod.Budget(0.0, coupling=lambda x: x[:1]).project(Y, Y - 3.0),
        [1.0, 1.0, 1.0],
    ),
    "A-half": (lambda: aipod.Affine(jnp.ones((1, 3), HALF), 3.0).project(Y), [1.0, 1.0, 1.0]),
    "A-half-rank": (lambda: aipod.Affine(jnp.array([[1.0, 3.0], [1.1, 3.3]], HALF)).rank, 1),
    "A-bools": (lambda: aipod.Affine(ONES > 0, 3.0).project(Y), [1.0, 1.0, 1.0]),
    "A-huge": (lambda: aipod.Affine([[1e300, 0.0]], 1e300).project(jnp.zeros(2)), [1.0, 0.0]),
    "A-huge-sparse": (
        lambda: aipod.Affine(scipy.sparse.csr_array([[1e300, 1e300]]), 2e300).project(jnp.zeros(2)),
        [1.0, 1.0],
    ),
    "A-tiny-sparse": (
        lambda: aipod.Affine(scipy.sparse.csr_array([[1e-200] * 2]), 2e-200).project(jnp.zeros(2)),
        [1.0, 1.0],
    ),
    "c-list": (lambda: aipod.Affine(ONES, [3.0, 3.0]).project(Y), [1.0, 1.0, 1.0]),
    "c-half": (lambda: aipod.Affine(ONES, jnp.full(2, 3.0, HALF)).project(Y), [1.0, 1.0, 1.0]),
    "flow-no-edge": (lambda: aipod.Flow([], [], [0.0, 0.0]).project(jnp.zeros(0)), []),
    "flow-unsigned": (
        lambda: aipod.Flow(np.array([0], np.uint64), np.array([1]), [-1.0, 1.0]).project(Y[:1]),
        [1.0],
    ),
    "flow-loop": (lambda: aipod.Flow([0], [0], [0.0, 0.0]).project(Y[:1] + 2.0), [2.0]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_understood(name):
    act, expected = ACCEPTED[name]
    np.testing.assert_allclose(act(), expected, atol=1e-6)


def test_a_product_keeps_the_container_of_a_point():
    made = aipod.Product([aipod.Free(), aipod.Budget(3.0)])
    near = made.project(Pair(Y, Y))
    assert isinstance(near, Pair)
    np.testing.assert_allclose(near.b, np.ones(3))
    keyed = aipod.Product({"a": aipod.Free(), "b": aipod.Budget(3.0)})
    near = keyed.project(OrderedDict(b=Y, a=Y))
    assert isinstance(near, OrderedDict)
    assert list(near) == ["b", "a"]
    np.testing.assert_allclose(near["b"], np.ones(3))
    assert keyed.constraints(OrderedDict(b=Y, a=Y)) == (1, 1)
