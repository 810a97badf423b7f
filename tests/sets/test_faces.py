"""The active faces of sets with bounds: affine sets, along which the projection moves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import aipod
from tests.sets.bounded_kinds import DISTINCT, KINDS, MOVE, X, flat

over = pytest.mark.parametrize("build", DISTINCT.values(), ids=DISTINCT)


STEP = 1e-6


@eqx.filter_jit
def looked_at(set_, y, x, direction, move):
    """The projection of y, its derivatives, and the face that it lies on with the face's own."""
    flat_y, restore = ravel_pytree(y)

    def project(v, x):
        return ravel_pytree(set_.project(restore(v), x))[0]

    near, derivative = jax.linearize(project, flat_y, x)
    by_y, by_x = jnp.eye(near.size), derivative(jnp.zeros_like(near), move)
    transposed = jax.linear_transpose(derivative, flat_y, x)
    signs = jnp.array([1.0, -1.0, 0.0, 0.0])[:, None] * STEP
    ends = jax.vmap(project)(
        flat_y[None] + signs * direction[None], x[None] + signs[::-1] * move[None]
    )
    # project(near - (near - y)) = near: the way back is the correction of a minimiser.
    face = set_.face(restore(near), restore(near - flat_y), x)
    return {
        "near": near,
        "by x": by_x,
        "forward": jax.vmap(lambda v: derivative(v, jnp.zeros_like(x)), out_axes=1)(by_y),
        "reverse": jax.vmap(lambda v: transposed(v)[0])(by_y),
        "differences": ((ends[0] - ends[1]) / (2 * STEP), (ends[3] - ends[2]) / (2 * STEP)),
        "tangent": jax.vmap(lambda v: ravel_pytree(face.tangent(restore(v)))[0], out_axes=1)(by_y),
        "anchor": jax.jvp(lambda x: face.anchor(x, like=y), (x,), (move,)),
        "follow": jax.jvp(lambda x: face.follow(restore(near), x), (x,), (move,)),
        "on face": face.project(restore(near), x),
        "onto face": face.project(y, x),
        "residual": face.residual(restore(near), x),
        "fixed": face.at(x).project(y),
        "active": face.active,
        "again": set_.holding(face.active).tangent(y),
    }


@over
def test_the_projection_moves_along_its_face_and_with_it(build):
    rng = np.random.default_rng(0)
    poly = build(rng, 3, coupled=True)
    v = 2 * rng.normal(size=poly.size)
    direction = rng.normal(size=poly.size)
    found = looked_at(poly.set, poly.tree(v), X, jnp.asarray(direction), MOVE)
    near, P = flat(found["near"]), np.asarray(found["tangent"])

    # An affine set through the projection, and an orthogonal projection on its directions.
    same = {"rtol": 0, "atol": 1e-10}
    np.testing.assert_allclose(P, P.T, **same)
    np.testing.assert_allclose(P @ P, P, **same)
    np.testing.assert_allclose(poly.A @ P, 0.0, **same)
    for name in ("on face", "onto face", "fixed"):
        np.testing.assert_allclose(flat(found[name]), near, **same)
    np.testing.assert_allclose(flat(found["residual"]), 0.0, **same)
    np.testing.assert_allclose(P @ v + flat(found["anchor"][0]), near, **same)
    np.testing.assert_allclose(P @ flat(found["anchor"][0]), 0.0, **same)
    np.testing.assert_allclose(flat(found["again"]), P @ v, **same)

    # Active where the projection is at a bound, and nowhere else.
    lower, upper = np.asarray(poly.lower(X)), np.asarray(poly.upper(X))
    at = np.where(near <= lower + 1e-12, -1, np.where(near >= upper - 1e-12, 1, 0))
    sides = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found["active"])])
    # A product has no mark for the entries of an affine part, which come last.
    np.testing.assert_array_equal(np.abs(sides), np.abs(at[: sides.size]))
    assert np.all(at[sides.size :] == 0)

    # Its derivatives are the projection's.
    np.testing.assert_allclose(found["forward"], P, **same)
    np.testing.assert_allclose(found["reverse"], P, **same)
    by_x = flat(found["by x"])
    np.testing.assert_allclose(flat(found["anchor"][1]), by_x, **same)
    np.testing.assert_allclose(flat(found["follow"][1]), by_x, **same)
    np.testing.assert_array_equal(flat(found["follow"][0]), near)

    # And what central differences say.
    in_y, in_x = found["differences"]
    np.testing.assert_allclose(in_y, P @ direction, rtol=0, atol=1e-6)
    np.testing.assert_allclose(in_x, by_x, rtol=0, atol=1e-6)
    assert np.max(np.abs(by_x)) > 1e-3


@pytest.mark.parametrize(
    "made",
    [
        aipod.Free(),
        aipod.Budget(1.0),
        aipod.Affine(np.ones((1, 3)), 1.0),
        aipod.Product([aipod.Budget(1.0), aipod.Free()]),
        aipod.Consensus(),
    ],
)
def test_an_affine_set_is_its_own_face(made):
    y = [jnp.ones(3), jnp.ones(2)]
    assert made.affine
    assert made.face(y, y) is made
    assert made.holding(None) is made
    assert not jax.tree.leaves(made.active)


def test_a_face_is_an_affine_set():
    face = aipod.Simplex().face(jnp.array([0.5, 0.5, 0.0]), jnp.array([1.0, 1.0, 2.0]))
    assert face.affine
    assert face.face(jnp.ones(3), jnp.ones(3)) is face
    np.testing.assert_allclose(face.tangent(jnp.array([1.0, 0.0, 5.0])), [0.5, -0.5, 0.0])
    np.testing.assert_allclose(
        face.directions().project(jnp.array([1.0, 0.0, 5.0])), [0.5, -0.5, 0]
    )
    np.testing.assert_allclose(face.anchor(), [0.5, 0.5, 0.0])


@pytest.mark.parametrize(
    "made", [aipod.Box(0.0, 1.0), aipod.Simplex(), aipod.Product([aipod.Simplex()])]
)
@pytest.mark.parametrize("method", ["tangent", "anchor", "follow", "directions"])
def test_a_set_with_bounds_sends_to_its_face(made, method):
    y = jnp.ones(2)
    if isinstance(made, aipod.Product):
        y = [y]
    arguments = {"tangent": (y,), "anchor": (), "follow": (y, y), "directions": ()}[method]
    assert not made.affine
    with pytest.raises(ValueError, match=r"not affine.*face\(y, correction\)"):
        getattr(made, method)(*arguments)


def test_the_multiplier_decides_for_an_entry_on_its_bound():
    y = jnp.array([0.0, 0.0, 1.0, 1.0, 0.5])
    pull = jnp.array([1.0, -1.0, 1.0, -1.0, 0.0])
    # At 0 a gradient of 1 keeps the entry there; one of -1 pulls it inside.
    assert aipod.Box(0.0, 1.0).face(y, pull, step=0.1).active.tolist() == [-1, 0, 0, 1, 0]
    # On a simplex, what all entries have in common is the multiplier of the sum.
    face = aipod.CappedSimplex(2.5, 1.0).face(y, pull - 7.0, step=0.1)
    assert face.active.tolist() == [-1, 0, 0, 1, 0]
    # Without a correction, the entries on their bounds.
    assert aipod.Box(0.0, 1.0).face(y, jnp.zeros(5)).active.tolist() == [-1, -1, 1, 1, 0]
    assert aipod.Simplex(2.5).face(y, jnp.zeros(5)).active.tolist() == [-1, -1, 0, 0, 0]
    # Equal bounds leave no choice.
    assert aipod.Box(1.0, 1.0).face(jnp.ones(1), -jnp.ones(1)).active.tolist() == [-1]


def test_noise_does_not_switch_a_face_to_and_fro():
    """A minimiser with strict complementarity, seen through noise of a tenth of the margins."""
    rng = np.random.default_rng(0)
    y, gradient = np.array([0.0, 0.0, 0.6, 0.4]), np.array([0.5, 1.0, 0.0, 0.0])
    made, active = aipod.Simplex(), [-1, -1, 0, 0]
    look = jax.jit(lambda y, correction: made.face(y, correction, step=0.5).active)
    for _ in range(100):
        seen = jnp.asarray(y + 0.04 * rng.uniform(-1, 1, size=4))
        learned = jnp.asarray(gradient + 0.05 * rng.uniform(-1, 1, size=4))
        assert look(seen, learned).tolist() == active


def test_a_bound_changes_its_state_only_by_a_clear_margin():
    rng = np.random.default_rng(0)
    made = aipod.Box(0.0, 1.0)
    # 0.3 inside, and a multiplier whose step would just reach the bound.
    y, gradient = jnp.array([0.3, 0.7]), jnp.array([0.3, -0.3])
    alone, held = [], []
    kept = made.face(y, 2.5 * gradient).active
    for _ in range(40):
        noisy = gradient * (1 + 0.3 * rng.uniform(-1, 1))
        alone.append(made.face(y, noisy).active.tolist())
        kept = made.face(y, noisy, previous=kept).active
        held.append(kept.tolist())
    assert [0, 0] in alone
    assert [-1, 1] in alone
    assert held == [[-1, 1]] * 40
    # By a factor of 2 the state does change, both ways.
    freed = made.face(y, gradient / 2.1, previous=kept).active
    assert freed.tolist() == [0, 0]
    assert made.face(y, 1.9 * gradient, previous=freed).active.tolist() == [0, 0]
    assert made.face(y, 2.1 * gradient, previous=freed).active.tolist() == [-1, 1]


def test_the_state_of_a_face_is_carried_through_a_loop():
    made = aipod.Product({"w": aipod.Simplex(), "b": aipod.Free(), "c": aipod.Box(0.0, 1.0)})
    y = {"w": jnp.array([1.0, 0.0, 0.0]), "b": jnp.ones(2), "c": jnp.array([0.0, 0.5])}
    pulls = jax.tree.map(lambda leaf: jnp.stack([leaf, 3 - leaf]), y)

    @jax.jit
    def run(pulls):
        def body(active, correction):
            face = made.face(y, correction, previous=active)
            return face.active, made.holding(face.active).tangent(y)

        start = made.face(y, jax.tree.map(jnp.zeros_like, y)).active
        return jax.lax.scan(body, start, pulls)

    active, tangents = run(pulls)
    assert active["b"] is None
    assert active["w"].dtype == jnp.int8
    np.testing.assert_allclose(tangents["b"], np.ones((2, 2)))


@pytest.mark.parametrize("name", ["capped", "bounded-affine"])
def test_a_minimiser_moves_with_its_face(name):
    """dy*/dx of a quadratic on a set that moves, by the face's formula and by differences."""
    rng = np.random.default_rng(3)
    poly = KINDS[name](rng, 3, coupled=True)
    root = rng.normal(size=(poly.size, poly.size)) / poly.size**0.5
    curvature, mixed = (
        jnp.asarray(np.eye(poly.size) + root @ root.T),
        rng.normal(size=(poly.size, 2)),
    )
    length, center = 1 / np.linalg.norm(curvature, 2), jnp.asarray(2 * rng.normal(size=poly.size))
    restore = ravel_pytree(poly.like)[1]

    def gradient(y, x):
        return curvature @ (y - center) + jnp.asarray(mixed) @ x

    @jax.jit
    def minimiser(x):
        def one(_, y):
            ahead = restore(y - length * gradient(y, x))
            return ravel_pytree(poly.set.project(ahead, x))[0]

        return jax.lax.fori_loop(0, 600, one, jnp.zeros(poly.size))

    @jax.jit
    def slope(y):
        face = poly.set.face(restore(y), restore(gradient(y, X)), X, step=length)

        def tangent(v):
            return ravel_pytree(face.tangent(restore(v)))[0]

        def followed(x):
            return ravel_pytree(face.follow(restore(y), x))[0]

        # y = its way with the face + z along it, such that the gradient has no part along it.
        _, carried = jax.jvp(followed, (X,), (MOVE,))
        push = curvature @ carried + jnp.asarray(mixed) @ MOVE
        P = jax.vmap(tangent)(jnp.eye(poly.size))
        return carried - jnp.linalg.pinv(P @ curvature @ P) @ (P @ push), face.active

    found, active = slope(minimiser(X))
    exact = (minimiser(X + 1e-5 * MOVE) - minimiser(X - 1e-5 * MOVE)) / 2e-5
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-7)
    assert 0 < np.count_nonzero(flat(active)) < poly.size


@pytest.mark.parametrize("name", ["simplex", "bounded-affine"])
def test_a_projection_has_derivatives_of_its_derivatives(name):
    poly = KINDS[name](np.random.default_rng(0), 1)
    v = jnp.asarray(np.random.default_rng(1).normal(size=poly.size))

    def energy(v):
        return jnp.sum(flat_project(v) ** 2) / 2

    def flat_project(v):
        return ravel_pytree(poly.set.project(poly.tree(v)))[0]

    # The projection is linear around v: the Hessian of half its square is P'P = P.
    hessian = jax.jit(jax.jacfwd(jax.grad(energy)))(v)
    np.testing.assert_allclose(hessian, jax.jit(jax.jacfwd(flat_project))(v), atol=1e-10)
