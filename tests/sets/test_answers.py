"""What sets answer about themselves, and what a set of one's own gets from `AbstractSet`."""

import ast
import inspect
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import aipod
from aipod.sets import AbstractSet
from aipod.sets._agreement import AbstractAgreement, AbstractRound, bytes_of_one_client

A = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
Y = jnp.array([1.0, 2.0, 5.0])
CLIENTS = {"a": jnp.zeros((4, 2)), "b": jnp.zeros((4, 3, 1))}


SIGNS = jnp.array([1.0, -1.0, 1.0])


class Balanced(AbstractSet):
    """{y : y[0] - y[1] + y[2] = 0}, with the four methods that a set must answer and no more."""

    def project(self, y, x=None):
        return self.tangent(y)

    def tangent(self, v):
        return v - SIGNS * (SIGNS @ v) / 3

    def anchor(self, x=None, *, like=None):
        return 0.0 * (SIGNS if like is None else like)

    def residual(self, y, x=None):
        return SIGNS @ y


class Shifted(AbstractSet):
    """{y : y[0] = x^2}, which says that it moves with x and nothing else."""

    @property
    def coupled(self):
        return True

    def project(self, y, x=None):
        return y.at[0].set(x**2)

    def tangent(self, v):
        return v.at[0].set(0.0)

    def anchor(self, x=None, *, like=None):
        return jnp.zeros_like(like).at[0].set(x**2)

    def residual(self, y, x=None):
        return y[0] - x**2


@pytest.mark.parametrize(
    ("made", "point", "expected"),
    [
        (aipod.Free(), Y, (0, 0)),
        (aipod.Budget(1.0), Y, (1, 1)),
        (aipod.Affine(A, 0.0), Y, (2, 1)),
        (aipod.Affine(A, 0.0, coupling=np.ones((2, 1))), Y, (2, 1)),
        (aipod.Affine(lx.MatrixLinearOperator(jnp.asarray(A))), Y, (2, None)),
        (aipod.Consensus(), CLIENTS, (15, 15)),
        (aipod.Flow([0, 1], [1, 0], np.zeros((3, 2))), jnp.zeros((3, 2)), (6, 3)),
        (aipod.Product([aipod.Budget(1.0), aipod.Consensus()]), [Y, CLIENTS], (16, 16)),
        (aipod.Product({"a": aipod.Free(), "b": Balanced()}), {"a": Y, "b": Y}, (None, None)),
        (Balanced(), Y, (None, None)),
        (aipod.Affine(A, 0.0).directions(), Y, (2, 1)),
    ],
)
def test_sets_count_their_constraints(made, point, expected):
    assert made.constraints(point) == expected


def test_only_the_whole_space_is_not_constrained():
    free, budget = aipod.Free(), aipod.Budget(1.0)
    assert not free.constrained
    assert not free.directions().constrained
    assert not aipod.Product([free, aipod.Product({"a": free})]).constrained
    assert aipod.Product([free, aipod.Product({"a": budget})]).constrained
    for made in (budget, aipod.Affine(A), aipod.Consensus(), Balanced()):
        assert made.constrained


def test_everyone_is_consensus_without_absent_clients():
    assert aipod.Consensus().everyone
    assert aipod.Consensus([1.0, 2.0]).everyone
    assert not aipod.Consensus(participation=0.5).everyone
    assert not aipod.Product([aipod.Consensus()]).everyone
    for made in (aipod.Free(), aipod.Budget(1.0), aipod.Affine(A), Balanced()):
        assert not made.everyone


def test_a_set_of_one_s_own_solves_a_problem():
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + jnp.sum(x**2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
        lower_set=Balanced(),
    )
    assert aipod.check(problem, Y, Y, key=jax.random.key(0)).ok
    solver = aipod.EAiPOD(upper_lr=0.2, lower_lr=0.5, lower_prob=0.5, lower_steps=5)
    solution = aipod.solve(problem, solver, Y, Y, steps=60, key=jax.random.key(0))
    # y* = P x, so F = |P x - 1|^2 + |x|^2 is smallest at P 1 / 2.
    np.testing.assert_allclose(solution.x, jnp.array([1.0, 2.0, 1.0]) / 3, atol=1e-4)
    assert jnp.abs(Balanced().residual(solution.y)) < 1e-6


def test_a_set_that_says_only_that_it_moves_can_be_fixed_and_followed():
    made, x = Shifted(), jnp.array(3.0)
    fixed = made.at(x)
    assert not fixed.coupled
    for answer in (fixed.project(Y), fixed.anchor(like=Y) + fixed.tangent(Y)):
        np.testing.assert_allclose(answer, [9.0, 2.0, 5.0])
    np.testing.assert_allclose(fixed.residual(Y), -8.0)
    np.testing.assert_allclose(fixed.directions().project(Y), [0.0, 2.0, 5.0])
    value, slope = jax.jvp(lambda x: made.follow(Y, x), (x,), (jnp.array(1.0),))
    np.testing.assert_array_equal(value, Y)
    np.testing.assert_allclose(slope, [6.0, 0.0, 0.0])
    # As an argument of a compiled function, as loops over y have it.
    np.testing.assert_allclose(eqx.filter_jit(lambda s: s.project(Y))(fixed), [9.0, 2.0, 5.0])


def test_a_set_that_moves_takes_part_in_a_whole_problem():
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 4.0) ** 2) + x**2,
        lower=lambda x, y, _: 0.5 * jnp.sum((y - 2.0) ** 2),
        lower_set=Shifted(),
    )
    # F(x) = (x^2 - 4)^2 + x^2 + 8.
    slope = aipod.exact_hypergradient(problem, jnp.array(1.5), Y)
    np.testing.assert_allclose(slope, 4 * 1.5 * (1.5**2 - 4) + 3.0, rtol=1e-8)


def test_the_directions_of_a_weighted_set_keep_its_inner_product():
    class Mean(AbstractSet):
        weights: jax.Array

        def project(self, y, x=None):
            return jnp.broadcast_to(self.weights @ y, y.shape)

        def tangent(self, v):
            return self.project(v)

        def anchor(self, x=None, *, like=None):
            return jnp.zeros_like(like)

        def residual(self, y, x=None):
            return y - self.project(y)

        def cotangent(self, gradient):
            return self.weights * jnp.sum(gradient)

        def riesz(self, gradient):
            return gradient / self.weights

    made = Mean(jnp.array([0.5, 0.25, 0.25]))
    along = made.directions()
    assert along.directions() is along
    for name in ("cotangent", "riesz", "tangent", "residual"):
        np.testing.assert_array_equal(getattr(along, name)(Y), getattr(made, name)(Y))


def test_the_directions_of_a_set_of_clients_keep_its_clients():
    class First(AbstractSet):
        """All clients agree; in a round only the first is present."""

        present: bool = eqx.field(default=False, static=True)

        def project(self, y, x=None):
            return jnp.broadcast_to(jnp.mean(y, axis=0, keepdims=True), y.shape)

        def tangent(self, v):
            return self.project(v)

        def anchor(self, x=None, *, like=None):
            return jnp.zeros_like(like)

        def residual(self, y, x=None):
            return y - self.project(y)

        @property
        def federated(self):
            return True

        def for_round(self, key):
            return First(present=True)

        def keep_absent(self, new, old):
            return old.at[0].set(new[0]) if self.present else new

    along = First().directions()
    assert along.federated
    new, old = jnp.ones((3, 2)), jnp.zeros((3, 2))
    np.testing.assert_array_equal(along.keep_absent(new, old), new)
    one = along.for_round(jax.random.key(0))
    np.testing.assert_array_equal(one.keep_absent(new, old), old.at[0].set(1.0))


def test_agreement_over_a_network_needs_little_of_its_own():
    """What the sets of one client among many inherit."""

    class Elsewhere(AbstractAgreement):
        def project(self, y, x=None):
            return y

        def tangent(self, v):
            return v

        def residual(self, y, x=None):
            return y

        def for_round(self, key):
            return Round(self)

    class Round(AbstractRound):
        base: Elsewhere

        def project(self, y, x=None):
            return y + 1.0

        def tangent(self, v):
            return v

    made = Elsewhere()
    assert made.federated
    assert made.per_client
    assert not made.everyone
    assert made.directions() is made
    one = made.for_round(jax.random.key(0))
    np.testing.assert_array_equal(one.project_corrected(Y, 100.0 * Y), Y + 1.0)
    np.testing.assert_array_equal(one.anchor(like=Y), jnp.zeros(3))
    assert bytes_of_one_client(CLIENTS) == 8 * (2 + 3)


def test_no_concrete_set_overrides_a_concrete_set():
    """Classes are abstract or final: only abstract classes have subclasses; nobody calls super."""
    import aipod.sets

    folder = Path(inspect.getfile(aipod.sets)).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "super", f"super() in {path.name}"
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                assert all(b.startswith("Abstract") or b == "eqx.Module" for b in bases), bases
