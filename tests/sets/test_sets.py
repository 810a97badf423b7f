"""Every kind of set against the dense formulas, over all ranks."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

import aipod
from aipod.sets import AbstractSet


class Dense(NamedTuple):
    """A set, and what it must be: {y : A y + h(x) = c} on the ravelled y.

    `metric` weighs the entries of y in the inner product in which `project` is orthogonal.
    """

    set: AbstractSet
    A: np.ndarray
    c: np.ndarray
    h: Callable[[Array], Array] | None
    like: PyTree
    metric: np.ndarray

    def tangent(self) -> np.ndarray:
        scale = np.sqrt(self.metric)
        weighted = self.A / scale
        inside = np.eye(len(scale)) - np.linalg.pinv(weighted, rcond=1e-10) @ weighted
        return inside * scale / scale[:, None]

    def right(self, x: Array) -> np.ndarray:
        return self.c if self.h is None else self.c - np.asarray(self.h(x))

    def anchor(self, x: Array = None) -> np.ndarray:
        scale = np.sqrt(self.metric)
        return np.linalg.pinv(self.A / scale, rcond=1e-10) @ self.right(x) / scale

    def norm(self, v: np.ndarray) -> float:
        return np.sqrt(np.sum(self.metric * v**2))

    def tree(self, v: np.ndarray) -> PyTree:
        return ravel_pytree(self.like)[1](jnp.asarray(v))


def flat(tree: PyTree) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0])


def assert_close(value: PyTree, reference: np.ndarray) -> None:
    np.testing.assert_allclose(flat(value), reference, rtol=0, atol=1e-10)


def matrix_of_rank(rng: np.random.Generator, rows: int, columns: int, rank: int) -> np.ndarray:
    rank = min(rank, rows, columns)
    left = np.linalg.qr(rng.normal(size=(rows, rows)))[0]
    right = np.linalg.qr(rng.normal(size=(columns, columns)))[0]
    # Rows of different lengths: a set must not care.
    return 2.0 * left[:, :rank] @ np.diag(rng.uniform(0.5, 2.0, size=rank)) @ right[:rank]


def wave(x: Array, size: int) -> Array:
    """A smooth function of x with `size` values, no two alike."""
    return jnp.sin(jnp.arange(1.0, size + 1) * jnp.sum(x) + x[0] ** 2)


def coupling_for(A: np.ndarray, coupled: bool) -> Callable[[Array], Array] | None:
    """h(x) in the range of A, so that the set is never empty."""
    return (lambda x: A @ wave(x, A.shape[1])) if coupled else None


# -- One builder for each kind: (rng, rank, coupled) -> Dense. Kinds without a rank ignore it. --

TREE = {"left": jnp.zeros((2, 2)), "right": (jnp.zeros(3), jnp.zeros(()))}


def affine(convert: Callable, rows: int, columns: int, like: PyTree = None) -> Callable:
    def build(rng, rank, coupled=False):
        A = matrix_of_rank(rng, rows, columns, rank)
        c, h = A @ rng.normal(size=columns), coupling_for(A, coupled)
        point = jnp.zeros(columns) if like is None else like
        return Dense(aipod.Affine(convert(A), c, h), A, c, h, point, np.ones(columns))

    return build


def tree_operator(rng, rank, coupled=False):
    """A Lineax operator from TREE to a dictionary of two vectors."""
    A = matrix_of_rank(rng, 5, 8, rank)
    c, h = A @ rng.normal(size=8), coupling_for(A, coupled)

    def rows(value):
        return {"a": value[:2], "b": value[2:]}

    def columns(block):
        matrix = jnp.asarray(block)
        right = (matrix[:, 4:7], matrix[:, 7])
        return {"left": matrix[:, :4].reshape(-1, 2, 2), "right": right}

    operator = lx.PyTreeLinearOperator(
        {name: columns(block) for name, block in rows(A).items()},
        jax.eval_shape(lambda: rows(jnp.asarray(c))),
    )
    move = (lambda x: rows(h(x))) if coupled else None
    return Dense(aipod.Affine(operator, rows(c), move), A, c, h, TREE, np.ones(8))


def matrix_operator(rng, rank, coupled=False):
    """A Lineax operator on one array with two axes."""
    A = matrix_of_rank(rng, 4, 6, rank)
    c, h = A @ rng.normal(size=6), coupling_for(A, coupled)
    rows = jax.ShapeDtypeStruct((4,), jnp.result_type(float))
    operator = lx.PyTreeLinearOperator(jnp.asarray(A.reshape(4, 2, 3)), rows)
    return Dense(aipod.Affine(operator, c, h), A, c, h, jnp.zeros((2, 3)), np.ones(6))


def flow(*commodities: int) -> Callable:
    def build(rng, rank, coupled=False):
        # The path 0 -> 1 -> ... -> rank has that rank; more edges between its nodes add none.
        rank = min(rank, 4)
        path = np.arange(rank)
        more = rng.integers(0, rank + 1, size=(2, 7 - rank))
        senders, receivers = np.concatenate([path, more[0]]), np.concatenate([path + 1, more[1]])
        incidence = np.zeros((5, 7))
        np.add.at(incidence, (receivers, np.arange(7)), 1.0)
        np.add.at(incidence, (senders, np.arange(7)), -1.0)
        A = np.kron(np.eye(int(np.prod(commodities))), incidence)
        c, h = A @ rng.normal(size=A.shape[1]), coupling_for(A, coupled)
        shape = (*commodities, 5)
        move = (lambda x: h(x).reshape(shape)) if coupled else None
        made = aipod.Flow(senders, receivers, c.reshape(shape), move)
        return Dense(made, A, c, h, jnp.zeros((*commodities, 7)), np.ones(A.shape[1]))

    return build


def budget(weighted: bool) -> Callable:
    def build(rng, rank, coupled=False):
        entries = rng.uniform(-2.0, 2.0, size=8) if weighted else np.ones(8)
        A, c = entries[None], rng.normal(size=1)
        h = coupling_for(A, coupled)
        weights = ravel_pytree(TREE)[1](jnp.asarray(entries)) if weighted else None
        return Dense(aipod.Budget(c[0], weights, h), A, c, h, TREE, np.ones(8))

    return build


def consensus(weighted: bool) -> Callable:
    def build(rng, rank, coupled=False):
        clients, sizes = rank + 1, (2, 3)
        differences = np.eye(clients)[:-1] - np.eye(clients)[1:]
        A = scipy.linalg.block_diag(*(np.kron(differences, np.eye(size)) for size in sizes))
        weights = rng.uniform(0.5, 3.0, size=clients) if weighted else np.ones(clients)
        metric = np.concatenate([np.repeat(weights, size) for size in sizes])
        like = {"a": jnp.zeros((clients, 2)), "b": jnp.zeros((clients, 1, 3))}
        made = aipod.Consensus(weights) if weighted else aipod.Consensus()
        return Dense(made, A, np.zeros(len(A)), None, like, metric)

    return build


def free(rng, rank, coupled=False):
    return Dense(aipod.Free(), np.zeros((0, 8)), np.zeros(0), None, TREE, np.ones(8))


def product(container: Callable) -> Callable:
    def build(rng, rank, coupled=False):
        parts = [
            affine(np.asarray, 4, 7)(rng, rank, coupled),
            budget(weighted=False)(rng, rank, coupled),
            consensus(weighted=True)(rng, rank),
            free(rng, rank),
        ]
        return Dense(
            aipod.Product(container([part.set for part in parts])),
            scipy.linalg.block_diag(*(part.A for part in parts)),
            np.concatenate([part.c for part in parts]),
            lambda x: np.concatenate([part.c - part.right(x) for part in parts]),
            container([part.like for part in parts]),
            np.concatenate([part.metric for part in parts]),
        )

    return build


MATRIX_KINDS = {
    "dense-tall": affine(np.asarray, 9, 5),
    "dense-tree": affine(np.asarray, 5, 8, like=TREE),
    "scipy-tall": affine(scipy.sparse.coo_array, 9, 5),
    "scipy-tree": affine(scipy.sparse.csc_array, 5, 8, like=TREE),
    "bcoo": affine(lambda A: BCOO.fromdense(jnp.asarray(A)), 5, 8, like=TREE),
    "operator": affine(lambda A: lx.MatrixLinearOperator(jnp.asarray(A)), 5, 8),
    "operator-tree": tree_operator,
    "operator-matrix": matrix_operator,
    "flow": flow(),
    "flow-commodities": flow(2),
    "budget": budget(weighted=True),
}
COUPLED_KINDS = MATRIX_KINDS | {
    "product": product(lambda parts: dict(zip("abcd", parts, strict=True)))
}
KINDS = COUPLED_KINDS | {
    "consensus": consensus(weighted=False),
    "consensus-weighted": consensus(weighted=True),
    "free": free,
}


def over(kinds: dict[str, Callable]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", kinds.values(), ids=kinds)


def without(kinds: dict[str, Callable], *names: str) -> dict[str, Callable]:
    """Fewer kinds, where several would take the same path through slow compilations."""
    return {name: build for name, build in kinds.items() if name not in names}


# -- Identities over random ranks ----------------------------------------------------------------


# The set is an argument, so sets of one shape share one compilation.
@eqx.filter_jit
def answers(set_, y):
    return set_.project(y), set_.tangent(y), set_.cotangent(y)


@over(KINDS)
@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(0, 5))
@example(seed=0, rank=0)
@example(seed=0, rank=5)
def test_project_is_the_orthogonal_projection(build, seed, rank):
    rng = np.random.default_rng(seed)
    dense = build(rng, rank)
    u, v = rng.normal(size=(2, len(dense.metric))) * 10 ** rng.uniform(-1, 1)
    near, tangent, cotangent = (flat(tree) for tree in answers(dense.set, dense.tree(v)))
    assert_close(near, dense.tangent() @ v + dense.anchor())
    assert_close(tangent, dense.tangent() @ v)
    assert_close(cotangent, dense.tangent().T @ v)
    # Feasible, idempotent, non-expansive.
    assert np.max(np.abs(dense.A @ near - dense.c), initial=0.0) < 1e-10
    assert_close(answers(dense.set, dense.tree(near))[0], near)
    apart = near - flat(answers(dense.set, dense.tree(u))[0])
    assert dense.norm(apart) <= dense.norm(v - u) * (1 + 1e-12)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("shape", [(4, 7), (9, 5)])
@pytest.mark.parametrize("rank", [0, 2, 4])
def test_dense_factor_knows_its_rank_and_keeps_the_smaller_basis(convert, shape, rank):
    A = matrix_of_rank(np.random.default_rng(0), *shape, rank)
    made = aipod.Affine(convert(A))
    assert made.rank == rank
    kernel = made.map.kernel
    size = rank if kernel is None else kernel.shape[1]
    assert size == min(rank, shape[1] - rank)


def test_rank_is_told_apart_from_rounding_in_single_precision():
    row = np.random.default_rng(0).normal(size=(1, 6)).astype(np.float32)
    # A multiple of a row in float32 is that row up to rounding, which is no second constraint.
    assert aipod.Affine(np.concatenate([row, np.float32(1.1) * row])).rank == 1


# -- Sets that move with x -------------------------------------------------------------------------


@over(COUPLED_KINDS)
def test_coupled_set_moves_as_the_dense_formula_says(build):
    rng = np.random.default_rng(1)
    dense = build(rng, 2, coupled=True)
    x, v = jnp.asarray(rng.normal(size=3)), rng.normal(size=len(dense.metric))
    y = dense.tree(v)
    expected = dense.tangent() @ v + dense.anchor(x)
    assert dense.set.coupled
    assert_close(dense.set.project(y, x), expected)
    assert_close(dense.set.anchor(x, like=y), dense.anchor(x))
    fixed = dense.set.at(x)
    assert not fixed.coupled
    assert_close(fixed.project(y), expected)
    assert_close(fixed.anchor(like=y), dense.anchor(x))
    assert_close(fixed.tangent(y), dense.tangent() @ v)


@over(without(COUPLED_KINDS, "scipy-tall", "bcoo"))
def test_follow_keeps_the_value_and_moves_as_the_anchor(build):
    rng = np.random.default_rng(2)
    dense = build(rng, 2, coupled=True)
    x, v = jnp.asarray(rng.normal(size=3)), rng.normal(size=len(dense.metric))
    direction, w = rng.normal(size=3), rng.normal(size=len(dense.metric))
    y = dense.tree(v)
    assert np.array_equal(flat(dense.set.follow(y, x)), v)
    step = 1e-6 * direction
    moved = (dense.anchor(x + step) - dense.anchor(x - step)) / 2e-6
    # Reverse mode, as the hypergradient uses it; and y keeps its own derivative.
    pull = jax.grad(lambda y, x: w @ ravel_pytree(dense.set.follow(y, x))[0], argnums=(0, 1))
    by_y, by_x = jax.jit(pull)(y, x)
    np.testing.assert_allclose(by_x @ direction, w @ moved, rtol=1e-6)
    assert_close(by_y, w)


@over({name: COUPLED_KINDS[name] for name in ("dense-tree", "scipy-tree", "product")})
def test_project_differentiates_in_x_as_the_anchor(build):
    rng = np.random.default_rng(3)
    dense = build(rng, 2, coupled=True)
    x, direction = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=3))
    y = dense.tree(rng.normal(size=len(dense.metric)))
    step = 1e-6 * direction
    expected = (dense.anchor(x + step) - dense.anchor(x - step)) / 2e-6
    forward = jax.jvp(lambda x: dense.set.project(y, x), (x,), (direction,))[1]
    np.testing.assert_allclose(flat(forward), expected, rtol=0, atol=1e-7)


@over({name: KINDS[name] for name in ("consensus", "consensus-weighted", "free", "dense-tree")})
def test_sets_without_coupling_ignore_x(build):
    dense = build(np.random.default_rng(0), 2)
    y = dense.tree(np.arange(float(len(dense.metric))))
    assert not dense.set.coupled
    assert dense.set.at(jnp.ones(3)) is dense.set
    assert dense.set.follow(y, jnp.ones(3)) is y
    assert_close(dense.set.anchor(like=y), dense.anchor())


@over(MATRIX_KINDS)
def test_residual_is_the_equation_itself(build):
    rng = np.random.default_rng(4)
    dense = build(rng, 2, coupled=True)
    x, v = jnp.asarray(rng.normal(size=3)), rng.normal(size=len(dense.metric))
    assert_close(dense.set.residual(dense.tree(v), x), dense.A @ v - dense.right(x))
    assert_close(dense.set.at(x).residual(dense.tree(v)), dense.A @ v - dense.right(x))


@over({name: KINDS[name] for name in ("consensus", "consensus-weighted", "free")})
def test_residual_without_a_matrix_is_the_way_to_the_projection(build):
    rng = np.random.default_rng(5)
    dense = build(rng, 3)
    v = rng.normal(size=len(dense.metric))
    assert_close(dense.set.residual(dense.tree(v)), v - dense.tangent() @ v)


@pytest.mark.parametrize("container", [list, tuple])
def test_product_answers_part_by_part(container):
    parts = container([aipod.Budget(1.0), aipod.Affine(np.ones((2, 3)), 2.0), aipod.Free()])
    y = container([jnp.arange(4.0), jnp.arange(3.0), jnp.ones((2, 2))])
    for name in ("residual", "project", "tangent", "cotangent"):
        answer = getattr(aipod.Product(parts), name)(y)
        assert type(answer) is container
        for part, y_part, answer_part in zip(parts, y, answer, strict=True):
            assert_close(answer_part, flat(getattr(part, name)(y_part)))


@pytest.mark.parametrize("name", ["consensus", "consensus-weighted"])
def test_riesz_makes_the_tangent_of_a_gradient_a_descent_direction(name):
    # <g, P riesz(g)> = 0 exactly where g vanishes on the set: the projected gradient.
    dense = KINDS[name](np.random.default_rng(6), 3)
    g = np.random.default_rng(7).normal(size=len(dense.metric))
    direction = flat(dense.set.tangent(dense.set.riesz(dense.tree(g))))
    inside = dense.tangent()
    mean = np.mean(dense.metric[: len(dense.metric) // 5 * 2])
    np.testing.assert_allclose(direction, inside @ (g / dense.metric) * mean, atol=1e-12)
    assert g @ direction > 0


# -- Under jit, vmap and grad ----------------------------------------------------------------------


@over(without(KINDS, "scipy-tall", "bcoo", "operator"))
def test_jit_vmap_and_grad_agree_with_eager(build):
    rng = np.random.default_rng(8)
    dense = build(rng, 3)
    batch = rng.normal(size=(3, len(dense.metric)))
    w = jnp.asarray(rng.normal(size=len(dense.metric)))

    def entries(v):
        return ravel_pytree(dense.set.project(dense.tree(v)))[0]

    eager = np.stack([entries(v) for v in batch])
    assert_close(jax.jit(entries)(batch[0]), eager[0])
    assert_close(jax.vmap(entries)(jnp.asarray(batch)), eager.ravel())
    gradient = jax.grad(lambda v: w @ entries(v))(jnp.asarray(batch[0]))
    assert_close(gradient, dense.tangent().T @ np.asarray(w))


@over({name: COUPLED_KINDS[name] for name in ("dense-tree", "scipy-tree", "flow-commodities")})
def test_vmap_over_x_projects_on_as_many_sets(build):
    rng = np.random.default_rng(9)
    dense = build(rng, 2, coupled=True)
    xs, v = jnp.asarray(rng.normal(size=(3, 3))), rng.normal(size=len(dense.metric))
    together = jax.vmap(lambda x: ravel_pytree(dense.set.at(x).project(dense.tree(v)))[0])(xs)
    for x, near in zip(xs, together, strict=True):
        assert_close(near, dense.tangent() @ v + dense.anchor(x))


@over(KINDS)
def test_points_keep_their_structure(build):
    dense = build(np.random.default_rng(10), 2)
    y = dense.like
    for value in (dense.set.project(y), dense.set.tangent(y), dense.set.anchor(like=y)):
        assert jax.tree.structure(value) == jax.tree.structure(y)
        assert [a.shape for a in jax.tree.leaves(value)] == [a.shape for a in jax.tree.leaves(y)]
    known = dense.set.example()
    if known is not None:
        assert flat(known).shape == dense.metric.shape


# -- Particular inputs -----------------------------------------------------------------------------


def test_a_pytree_is_ravelled_in_the_order_of_jax():
    # "a" before "b", rows first: the single constraint picks y["b"][0].
    pick = aipod.Affine(np.eye(5)[4:], 7.0)
    near = pick.project({"b": jnp.zeros(1), "a": jnp.zeros((2, 2))})
    np.testing.assert_allclose(near["b"], [7.0])
    np.testing.assert_allclose(near["a"], np.zeros((2, 2)))


def test_one_number_stands_for_all_rows():
    A = np.eye(3, 5)
    np.testing.assert_allclose(aipod.Affine(A, 2.0).anchor(), [2, 2, 2, 0, 0])
    np.testing.assert_allclose(aipod.Affine(A).anchor(), np.zeros(5))
    sparse = aipod.Affine(scipy.sparse.csr_array(3 * A), 6.0)
    np.testing.assert_allclose(sparse.anchor(), [2, 2, 2, 0, 0], atol=1e-12)


def test_a_matrix_serves_as_a_linear_coupling():
    rng = np.random.default_rng(11)
    A, H = rng.normal(size=(2, 4)), rng.normal(size=(2, 3))
    x = {"a": jnp.asarray(rng.normal(size=2)), "b": jnp.asarray(0.3)}
    y = jnp.asarray(rng.normal(size=4))
    by_matrix = aipod.Affine(A, 1.0, coupling=H).project(y, x)
    by_function = aipod.Affine(A, 1.0, coupling=lambda x: H @ ravel_pytree(x)[0]).project(y, x)
    np.testing.assert_allclose(by_matrix, by_function, atol=1e-14)


@pytest.mark.parametrize("convert", [scipy.sparse.csr_array, np.asarray])
def test_integer_and_empty_matrices_are_matrices(convert):
    y = jnp.arange(3.0)
    total = aipod.Affine(convert(np.ones((1, 3), int)), 6.0)
    np.testing.assert_allclose(total.project(y), y + 1, atol=1e-12)
    nothing = aipod.Affine(convert(np.zeros((0, 3))))
    np.testing.assert_allclose(nothing.project(y), y)


def test_repeated_entries_of_a_sparse_matrix_add_up():
    entries, at = np.array([1.0, 1.0, 1.0]), (np.zeros(3, int), np.array([0, 0, 1]))
    expected = aipod.Affine(np.array([[2.0, 1.0]]), 5.0).anchor()
    scipy_set = aipod.Affine(scipy.sparse.coo_array((entries, at), shape=(1, 2)), 5.0)
    np.testing.assert_allclose(scipy_set.anchor(), expected, atol=1e-12)
    indices = jnp.asarray(np.stack(at, axis=1))
    bcoo_set = aipod.Affine(BCOO((jnp.asarray(entries), indices), shape=(1, 2)), 5.0)
    np.testing.assert_allclose(bcoo_set.anchor(), expected, atol=1e-12)


def test_rows_of_very_different_length_do_not_hurt_a_sparse_set():
    rng = np.random.default_rng(12)
    A = matrix_of_rank(rng, 4, 7, 4) * np.array([[1e-4], [1.0], [1e2], [1e5]])
    y, c = jnp.asarray(rng.normal(size=7)), A @ rng.normal(size=7)
    sparse, dense = aipod.Affine(scipy.sparse.csr_array(A), c), aipod.Affine(A, c)
    np.testing.assert_allclose(sparse.project(y), dense.project(y), atol=1e-9)


def test_an_almost_empty_set_is_not_called_empty():
    # c - h(x) is rounding error of a large c, and lies in the range of A only up to that.
    A = np.ones((2, 2))
    shift = jnp.array([1e6, 1e6 + 1e-7])
    aipod.Affine(A, 1e6, coupling=lambda x: shift).check(jnp.zeros(2), jnp.zeros(1))


def test_examples_of_the_documentation():
    np.testing.assert_allclose(aipod.Budget(1.0).project(jnp.zeros(4)), np.full(4, 0.25))
    near = aipod.Consensus().project(jnp.array([[1.0], [3.0]]))
    np.testing.assert_allclose(near, [[2.0], [2.0]])
    weighted = aipod.Consensus([3.0, 1.0]).project(jnp.array([[1.0], [3.0]]))
    np.testing.assert_allclose(weighted, [[1.5], [1.5]])
    path = aipod.Flow([0, 0, 1], [2, 1, 2], jnp.array([-1.0, 0.0, 1.0]))
    np.testing.assert_allclose(path.project(jnp.zeros(3)), [2 / 3, 1 / 3, 1 / 3], atol=1e-14)


# -- Large sets ------------------------------------------------------------------------------------


def test_a_large_graph_takes_the_sparse_path_and_agrees(monkeypatch):
    rng = np.random.default_rng(13)
    senders, receivers = rng.integers(0, 40, size=(2, 120))
    demand, flows = np.zeros((2, 40)), rng.normal(size=(2, 120))
    np.add.at(demand.T, receivers, flows.T)
    np.add.at(demand.T, senders, -flows.T)
    y = jnp.asarray(rng.normal(size=flows.shape))
    dense = aipod.Flow(senders, receivers, demand)
    monkeypatch.setattr(aipod.Flow, "_DENSE_ENTRIES", 0)
    sparse = aipod.Flow(senders, receivers, demand)
    assert sparse.rank is None
    assert dense.rank is not None
    assert_close(sparse.project(y), flat(dense.project(y)))
    assert_close(sparse.residual(y), flat(dense.residual(y)))


LARGE = """
    import resource
    import jax, numpy, scipy.sparse
    jax.config.update("jax_enable_x64", True)
    import aipod

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def projected(rows, columns):
        random = numpy.random.default_rng(1)
        A = scipy.sparse.random(rows - rows // 50, columns, density=10 / columns, rng=0)
        A = scipy.sparse.csr_array(scipy.sparse.vstack([A, A.tocsr()[: rows // 50]]))
        v, inside = random.normal(size=(2, columns))
        made = aipod.Affine(A, A @ inside)
        near = numpy.asarray(made.project(jax.numpy.asarray(v)))
        return abs(A @ (near - inside)).max(), abs((near - v) @ (near - inside)), made.rank

    projected(50, 100)
    before = peak()
    print(*projected(50_000, 100_000), peak() - before)
"""


def test_a_large_sparse_set_stays_sparse():
    # A process of its own, because the peak of the memory is known for a process only.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LARGE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    infeasible, oblique, rank, megabytes = done.stdout.split()
    assert float(infeasible) < 1e-8
    # The way to the projection stands upright on the set.
    assert float(oblique) < 1e-6
    assert rank == "None"
    # A dense matrix of this size takes 40 GB.
    assert float(megabytes) < 500
