"""Sets with bounds, each beside the same set as a matrix and vectors of NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.linalg
import scipy.sparse
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

import aipod

X = jnp.array([0.3, -0.2])
MOVE = jnp.array([0.7, 0.4])


class Polyhedron(NamedTuple):
    """{y : A y = b(x), lower(x) <= y <= upper(x)} on the ravelled y, and the same set."""

    set: aipod.AbstractSet
    A: np.ndarray
    b: Callable[[Array], np.ndarray]
    lower: Callable[[Array], np.ndarray]
    upper: Callable[[Array], np.ndarray]
    like: PyTree

    @property
    def size(self) -> int:
        return self.A.shape[1]

    def tree(self, v: np.ndarray) -> PyTree:
        return ravel_pytree(self.like)[1](jnp.asarray(v))


def flat(tree: PyTree) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0])


def wave(x: Array, size: int, scale: float) -> Array:
    """A smooth function of x with `size` values; `scale` 0 where nothing moves."""
    return scale * jnp.sin(jnp.arange(1.0, size + 1) * (x[0] + 2 * x[1]))


def random_bounds(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Finite, infinite and equal ones."""
    lower = rng.normal(size=size)
    upper = lower + rng.choice([0.0, 1.0], p=[0.1, 0.9], size=size) * rng.exponential(size=size)
    lower = np.where(rng.random(size) < 0.2, -np.inf, lower)
    return lower, np.where(rng.random(size) < 0.2, np.inf, upper)


def inside(rng: np.random.Generator, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """A point within the bounds, with some entries on them."""
    return np.clip(rng.normal(size=lower.size), lower, upper)


def moving(values: np.ndarray, coupled: bool, restore: Callable = lambda v: v) -> tuple:
    """What to give to a set, and the same as a function of x on the ravelled y."""
    scale = 0.05 if coupled else 0.0

    def at(x: Array) -> Array:
        return jnp.asarray(values) + wave(x, values.size, scale)

    return (lambda x: restore(at(x))) if coupled else restore(jnp.asarray(values)), at


# -- One builder for each kind: (rng, n, coupled) -> Polyhedron ------------------------------------


def tree_of(n: int) -> PyTree:
    return {"left": jnp.zeros((n, 2)), "right": (jnp.zeros(n), jnp.zeros(()))}


def box(rng, n, coupled=False):
    like = tree_of(n)
    restore = ravel_pytree(like)[1]
    lower, upper = random_bounds(rng, 3 * n + 1)
    (low, low_at), (high, high_at) = (moving(v, coupled, restore) for v in (lower, upper))
    if coupled:  # both by the same amount, so that they never cross
        high = lambda x: restore(jnp.asarray(upper) + wave(x, upper.size, 0.05))  # noqa: E731
    A, b = np.zeros((0, lower.size)), lambda x: np.zeros(0)
    return Polyhedron(aipod.Box(low, high), A, b, low_at, high_at, like)


def simplex(axis: int | None):
    def build(rng, n, coupled=False):
        like = tree_of(n) if axis is None else jnp.zeros((n, 4))
        size = flat(like).size
        A = np.ones((1, size))
        if axis is not None:
            A = (
                np.kron(np.eye(n), np.ones((1, 4)))
                if axis == -1
                else np.kron(np.ones(n), np.eye(4))
            )
        total, b = moving(0.2 + rng.exponential(size=len(A)), coupled)
        if axis is None:
            total = (lambda x: b(x)[0]) if coupled else total[0]
        zero = np.zeros(size)
        made = aipod.Simplex(total, axis=axis)
        return Polyhedron(made, A, b, lambda x: zero, lambda x: zero + np.inf, like)

    return build


def capped(axis: int | None):
    def build(rng, n, coupled=False):
        like = tree_of(n) if axis is None else jnp.zeros((n, 3))
        restore, size = ravel_pytree(like)[1], flat(like).size
        caps = rng.uniform(0.2, 1.0, size=size)
        cap, upper = moving(caps, coupled, restore)
        A = np.ones((1, size)) if axis is None else np.kron(np.eye(n), np.ones((1, 3)))
        total = A @ caps * rng.uniform(0.1, 0.7, size=len(A))
        given = float(total[0]) if axis is None else total
        made = aipod.CappedSimplex(given, cap, axis=axis)
        return Polyhedron(made, A, lambda x: total, lambda x: np.zeros(size), upper, like)

    return build


def bounded(make: Callable) -> Callable:
    """`Bounded` beside the equalities that make(rng, n) gives: (A, how to make the set, like)."""

    def build(rng, n, coupled=False):
        A, equalities, like = make(rng, n)
        restore, size = ravel_pytree(like)[1], A.shape[1]
        lower, upper = random_bounds(rng, size)
        point = inside(rng, lower, upper)
        low, low_at = moving(lower, coupled, restore)
        high, high_at = moving(upper, coupled, restore)
        # The set moves with one of its points, and so is never empty.
        h = (lambda x: -A @ wave(x, size, 0.05)) if coupled else None
        b = (lambda x: A @ point + A @ wave(x, size, 0.05)) if coupled else (lambda x: A @ point)
        made = aipod.Bounded(equalities(A @ point, h), low, high)
        return Polyhedron(made, A, b, low_at, high_at, like)

    return build


def low_rank(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Of rank 2: the same for all, since every rank is a program to compile."""
    return rng.normal(size=(rows, 2)) @ rng.normal(size=(2, columns))


def budget(rng, n):
    like = tree_of(n)
    weights = rng.uniform(-2.0, 2.0, size=3 * n + 1)
    tree = ravel_pytree(like)[1](jnp.asarray(weights))
    return weights[None], lambda c, h: aipod.Budget(c[0], tree, h), like


def dense(rng, n):
    A = low_rank(rng, 4, 3 * n + 1)
    return A, lambda c, h: aipod.Affine(A, c, h), tree_of(n)


def sparse(rng, n):
    A = low_rank(rng, 3, n + 3)
    return A, lambda c, h: aipod.Affine(scipy.sparse.csr_array(A), c, h), jnp.zeros(n + 3)


def operator(rng, n):
    A = low_rank(rng, 3, 2 * n)
    rows = jax.ShapeDtypeStruct((3,), jnp.result_type(float))
    made = lx.PyTreeLinearOperator(jnp.asarray(A.reshape(3, n, 2)), rows)
    return A, lambda c, h: aipod.Affine(made, c, h), jnp.zeros((n, 2))


def flow(rng, n):
    nodes, edges = n + 2, 2 * n + 3
    path = np.arange(nodes - 1)
    more = rng.integers(0, nodes, size=(2, edges - path.size))
    senders, receivers = np.concatenate([path, more[0]]), np.concatenate([path + 1, more[1]])
    incidence = np.zeros((nodes, edges))
    np.add.at(incidence, (receivers, np.arange(edges)), 1.0)
    np.add.at(incidence, (senders, np.arange(edges)), -1.0)

    def make(c, h):
        moved = None if h is None else lambda x: h(x).reshape(2, nodes)
        return aipod.Flow(senders, receivers, c.reshape(2, nodes), moved)

    return np.kron(np.eye(2), incidence), make, jnp.zeros((2, edges))


def product(rng, n, coupled=False):
    parts = {
        "a": simplex(None)(rng, n, coupled),
        "b": box(rng, n, coupled),
        "c": bounded(budget)(rng, n, coupled),
    }
    free = Polyhedron(
        aipod.Free(),
        np.zeros((0, 2)),
        lambda x: np.zeros(0),
        lambda x: np.full(2, -np.inf),
        lambda x: np.full(2, np.inf),
        jnp.zeros(2),
    )
    parts["d"] = free

    def joined(name: str) -> Callable:
        return lambda x: jnp.concatenate([getattr(p, name)(x) for p in parts.values()])

    return Polyhedron(
        aipod.Product({key: part.set for key, part in parts.items()}),
        scipy.linalg.block_diag(*(part.A for part in parts.values())),
        joined("b"),
        joined("lower"),
        joined("upper"),
        {key: part.like for key, part in parts.items()},
    )


KINDS = {
    "box": box,
    "simplex": simplex(None),
    "simplex-rows": simplex(-1),
    "simplex-columns": simplex(0),
    "capped": capped(None),
    "capped-rows": capped(-1),
    "bounded-budget": bounded(budget),
    "bounded-affine": bounded(dense),
    "bounded-sparse": bounded(sparse),
    "bounded-operator": bounded(operator),
    "bounded-flow": bounded(flow),
    "product": product,
}
# Other ways to give A, which is made dense: then everything is as for "bounded-affine".
MADE_DENSE = ("bounded-sparse", "bounded-operator")
DISTINCT = {name: build for name, build in KINDS.items() if name not in MADE_DENSE}
