"""The small problems that every generic test runs on, each with a start (x, y).

x satisfies the upper constraint; y is anywhere, so that no test passes because it started right.
Every lower set is non-empty at every x, so finite differences may leave the upper set.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

import aipod
from aipod.experiments.tasks.synthetic import Matrices, Options, matrices, orthonormal_rows


class Case(NamedTuple):
    name: str
    problem: aipod.Bilevel
    x: PyTree
    y: PyTree


def positive_definite(rng: np.random.Generator, size: int, *, low=0.5, high=2.0) -> np.ndarray:
    """A random symmetric matrix whose eigenvalues spread evenly over [low, high]."""
    basis = orthonormal_rows(rng, size, size)
    return basis.T @ np.diag(np.linspace(low, high, size)) @ basis


def repeat_rows(matrix: np.ndarray, *again: int) -> np.ndarray:
    """The matrix with the given rows once more at its end: the set stays, full row rank goes."""
    return np.concatenate([matrix, matrix[list(again)]])


class Synthetic(Matrices):
    """The matrices of the synthetic problem; A y + H x = 0, B x = 0."""

    def lower_solution(self, x: np.ndarray) -> np.ndarray:
        """y*(x) = (P_y - A^+ H) x."""
        pinv = np.linalg.pinv(self.A)
        return x - pinv @ (self.A @ x) - pinv @ (self.H @ x)


def synthetic_matrices(n: int = 8, seed: int = 0) -> Synthetic:
    options = Options(dimension=n, lower_rank=3, upper_rank=2, problem_seed=seed)
    return Synthetic(*matrices(options))


def synthetic(n: int = 8, seed: int = 0, noise: float | None = None) -> Case:
    """F = sin(c'x + d'y) + ln(||x + y||^2 + 1), g = 1/2 ||x - y||^2; with gradient noise or not."""
    data = synthetic_matrices(n, seed)
    samples = None if noise is None else aipod.Noise(noise)

    def extra(x, y, batch):
        return 0.0 if batch is None else batch(x, y)

    def upper(x, y, batch):
        value = jnp.sin(data.c @ x + data.d @ y) + jnp.log(jnp.sum((x + y) ** 2) + 1)
        return value + extra(x, y, batch)

    def lower(x, y, batch):
        return 0.5 * jnp.sum((x - y) ** 2) + extra(x, y, batch)

    problem = aipod.Bilevel(
        upper,
        lower,
        upper_set=aipod.Affine(data.B),
        lower_set=aipod.Affine(data.A, 0.0, coupling=data.H),
        upper_samples=samples,
        lower_samples=samples,
    )
    rng = np.random.default_rng(seed + 1)
    x = problem.upper_set.project(jnp.asarray(rng.normal(size=n)))
    return Case("synthetic", problem, x, jnp.asarray(rng.normal(size=n)))


class Quadratic(NamedTuple):
    """g = 1/2 y'G y + y'K x + b'y over A y = c: the lower solution is one linear system."""

    G: np.ndarray
    K: np.ndarray
    b: np.ndarray
    A: np.ndarray
    c: np.ndarray


def quadratic_matrices(seed: int = 2, *, size: int = 7, upper_size: int = 6) -> Quadratic:
    rng = np.random.default_rng(seed)
    A = repeat_rows(rng.normal(size=(2, size)), 1)
    return Quadratic(
        G=positive_definite(rng, size),
        K=rng.normal(size=(size, upper_size)),
        b=rng.normal(size=size),
        A=A,
        c=A @ rng.normal(size=size),
    )


def quadratic(seed: int = 2) -> Case:
    data = quadratic_matrices(seed)
    size, upper_size = data.K.shape
    rng = np.random.default_rng(seed + 100)
    curvature = positive_definite(rng, upper_size)
    goal = rng.normal(size=size)
    B = rng.normal(size=(2, upper_size))

    def upper(x, y, _):
        return 0.5 * jnp.sum((y - goal) ** 2) + 0.5 * x @ curvature @ x + jnp.sum(x) * jnp.sum(y)

    def lower(x, y, _):
        return 0.5 * y @ data.G @ y + y @ data.K @ x + data.b @ y

    problem = aipod.Bilevel(
        upper,
        lower,
        upper_set=aipod.Affine(B, B @ rng.normal(size=upper_size)),
        lower_set=aipod.Affine(data.A, data.c),
    )
    x = problem.upper_set.project(jnp.asarray(rng.normal(size=upper_size)))
    return Case("quadratic", problem, x, jnp.asarray(rng.normal(size=size)))


def _examples(rng: np.random.Generator, count: int, truth: np.ndarray) -> tuple[Array, Array]:
    inputs = rng.normal(size=(count, truth.size))
    labels = np.sign(inputs @ truth + 0.5 * rng.normal(size=count))
    return jnp.asarray(inputs), jnp.asarray(labels)


def logistic(seed: int = 3, features: int = 6) -> Case:
    """x: the logarithm of each feature's ridge penalty; y: a classifier whose weights sum to 0."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=features)
    train, held_out = _examples(rng, 24, truth), _examples(rng, 16, truth)

    def loss(y, batch):
        inputs, labels = batch
        return jnp.mean(jax.nn.softplus(-labels * (inputs @ y)))

    problem = aipod.Bilevel(
        upper=lambda x, y, batch: loss(y, batch),
        lower=lambda x, y, batch: loss(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        lower_set=aipod.Affine(np.ones((1, features))),
        upper_samples=aipod.FullBatch(held_out),
        lower_samples=aipod.Minibatches(train, 8),
    )
    x = jnp.asarray(rng.normal(size=features) - 1)
    return Case("logistic", problem, x, jnp.asarray(rng.normal(size=features)))


class Nonlinear(NamedTuple):
    """The pieces of A y + R tanh(W x) = c with A of rank 2 and 4 rows."""

    A: np.ndarray
    R: np.ndarray
    W: np.ndarray
    c: np.ndarray
    G: np.ndarray
    K: np.ndarray
    goal: np.ndarray

    def coupling(self, x: Array) -> Array:
        return self.R @ jnp.tanh(self.W @ x)

    def upper(self, x: Array, y: Array, _: None = None) -> Array:
        return jnp.sum(jnp.cosh(0.5 * (y - self.goal))) + jnp.sum(jnp.sin(x)) * jnp.sum(y)

    def lower(self, x: Array, y: Array, _: None = None) -> Array:
        return 0.5 * y @ self.G @ y + jnp.sum(jax.nn.softplus(y + self.K @ x))


def nonlinear_data(seed: int = 4, size: int = 7, upper_size: int = 6) -> Nonlinear:
    rng = np.random.default_rng(seed)
    R = rng.normal(size=(4, 2))
    return Nonlinear(
        A=R @ rng.normal(size=(2, size)),
        R=R,
        W=rng.normal(size=(2, upper_size)) / 2,
        c=R @ rng.normal(size=2),
        G=positive_definite(rng, size),
        K=rng.normal(size=(size, upper_size)) / 2,
        goal=rng.normal(size=size),
    )


def nonlinear_coupling(seed: int = 4) -> Case:
    data = nonlinear_data(seed)
    problem = aipod.Bilevel(
        data.upper, data.lower, lower_set=aipod.Affine(data.A, data.c, coupling=data.coupling)
    )
    rng = np.random.default_rng(seed + 100)
    size, upper_size = data.K.shape
    x = jnp.asarray(rng.normal(size=upper_size))
    return Case("nonlinear-coupling", problem, x, jnp.asarray(rng.normal(size=size)))


def nested(seed: int = 5) -> Case:
    """x and y are dictionaries and tuples of matrices, vectors and numbers."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(3, 2)) @ rng.normal(size=(2, 9))
    left = A @ rng.normal(size=(9, 2))

    def coupling(x):
        return left @ jnp.tanh(x["scale"] * x["pair"][0][:2] + x["matrix"][0])

    def upper(x, y, _):
        bend = jnp.sum(x["matrix"] ** 2) + jnp.sum(jnp.cos(x["pair"][1]))
        return bend + jnp.sum(jnp.sin(y["matrix"]) ** 2) + x["scale"] * jnp.sum(y["parts"][0])

    def lower(x, y, _):
        misfit = y["matrix"] - x["matrix"] @ y["matrix"][::-1] - x["pair"][0][None, :]
        tail = y["parts"][0] - x["pair"][1]
        return (
            0.5 * jnp.sum(misfit**2) + jnp.sum(jnp.cosh(tail)) + (y["parts"][1] - x["scale"]) ** 2
        )

    x = {
        "matrix": jnp.asarray(0.3 * rng.normal(size=(2, 2))),
        "pair": (jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=2))),
        "scale": jnp.asarray(0.7),
    }
    y = {
        "matrix": jnp.asarray(rng.normal(size=(2, 3))),
        "parts": (jnp.asarray(rng.normal(size=2)), jnp.asarray(-0.2)),
    }
    problem = aipod.Bilevel(
        upper, lower, lower_set=aipod.Affine(A, A @ rng.normal(size=9), coupling=coupling)
    )
    return Case("nested-pytrees", problem, x, y)


def federated_objectives(weights: np.ndarray, seed: int = 6, size: int = 3):
    """f and g as weighted sums of one smooth loss for each client."""
    rng = np.random.default_rng(seed)
    clients = len(weights)
    share = jnp.asarray(weights / np.sum(weights))
    G = jnp.asarray(np.stack([positive_definite(rng, size) for _ in range(clients)]))
    K = jnp.asarray(rng.normal(size=(clients, size, size)))
    goals = jnp.asarray(rng.normal(size=(clients, size)))

    def upper(x, y, _):
        each = jax.vmap(lambda x, y, goal: jnp.sum(jnp.cosh(y - goal)) + jnp.sum(x * y))
        return share @ each(x, y, goals)

    def lower(x, y, _):
        each = jax.vmap(lambda x, y, G, K: 0.5 * y @ G @ y + y @ K @ jnp.tanh(x))
        return share @ each(x, y, G, K)

    x = jnp.broadcast_to(jnp.asarray(rng.normal(size=size)), (clients, size))
    return upper, lower, x, jnp.asarray(rng.normal(size=(clients, size)))


def consensus(seed: int = 6) -> Case:
    upper, lower, x, y = federated_objectives(np.ones(3), seed)
    agree = aipod.Consensus()
    problem = aipod.Bilevel(upper, lower, upper_set=agree, lower_set=agree)
    return Case("consensus", problem, x, y)


def weighted_consensus(seed: int = 7) -> Case:
    weights = np.array([1.0, 2.0, 5.0])
    upper, lower, x, y = federated_objectives(weights, seed)
    agree = aipod.Consensus(weights)
    problem = aipod.Bilevel(upper, lower, upper_set=agree, lower_set=agree)
    return Case("weighted-consensus", problem, x, y)


def product(seed: int = 8) -> Case:
    """Each part of y in a set of its own; two of them move with the whole of x."""
    rng = np.random.default_rng(seed)
    A = repeat_rows(rng.normal(size=(1, 4)), 0)
    H = repeat_rows(rng.normal(size=(1, 5)), 0)
    lower_set = aipod.Product(
        {
            "affine": aipod.Affine(A, 0.5 * np.ones(2), coupling=H),
            "shares": aipod.Budget(1.0, coupling=lambda x: jnp.tanh(x[0] * x[1])),
            "clients": aipod.Consensus(),
            "free": aipod.Free(),
        }
    )

    def upper(x, y, _):
        return (
            jnp.sum(jnp.sin(y["affine"]))
            + jnp.sum(y["shares"] ** 3) * x[2]
            + jnp.sum(y["clients"] * jnp.arange(4.0).reshape(2, 2))
            + jnp.sum(y["free"]) ** 2
            + 0.5 * jnp.sum(x**2)
        )

    def lower(x, y, _):
        return (
            0.5 * jnp.sum((y["affine"] - x[1:]) ** 2 * jnp.arange(1.0, 5.0))
            + jnp.sum(jnp.cosh(y["shares"] - x[:3]))
            + 0.5 * jnp.sum((y["clients"] - x[:4].reshape(2, 2)) ** 2)
            + 0.5 * jnp.sum((y["free"] - jnp.sin(x[3:])) ** 2)
            + 0.1 * jnp.sum(y["affine"]) * jnp.sum(y["free"])
        )

    problem = aipod.Bilevel(
        upper, lower, upper_set=aipod.Budget(1.0, np.arange(1.0, 6.0)), lower_set=lower_set
    )
    shapes = {"affine": (4,), "shares": (3,), "clients": (2, 2), "free": (2,)}
    x = problem.upper_set.project(jnp.asarray(rng.normal(size=5)))
    y = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return Case("product", problem, x, y)


def flow(seed: int = 9) -> Case:
    """x: tolls on the edges, which also move demand; y: flows of two commodities."""
    rng = np.random.default_rng(seed)
    senders = np.array([0, 0, 1, 1, 2, 3])
    receivers = np.array([1, 2, 2, 3, 3, 0])
    shift = rng.normal(size=(2, 4, 6)) / 4
    shift = shift - shift.mean(axis=1, keepdims=True)
    demand = np.array([[-1.0, 0.0, 0.0, 1.0], [0.5, -0.5, 0.0, 0.0]])
    slope = rng.uniform(0.5, 2.0, size=(2, 6))

    def coupling(x):
        return shift @ jnp.tanh(x)

    def lower(x, y, _):
        return 0.5 * jnp.sum(slope * y**2) + jnp.sum(jnp.cosh(jnp.sum(y, axis=0))) + jnp.sum(y @ x)

    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(y**4) - jnp.sum(y @ x) + 0.5 * jnp.sum(x**2),
        lower=lower,
        upper_set=aipod.Budget(0.0),
        lower_set=aipod.Flow(senders, receivers, demand, coupling=coupling),
    )
    x = problem.upper_set.project(jnp.asarray(rng.normal(size=6)))
    return Case("flow", problem, x, jnp.asarray(rng.normal(size=(2, 6))))


def budget(seed: int = 10) -> Case:
    """A weighted sum of y that x moves."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 2.0, size=6)
    G = positive_definite(rng, 6)
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(jnp.cosh(y)) + jnp.sum(jnp.sin(x) * y),
        lower=lambda x, y, _: 0.5 * (y - x) @ G @ (y - x) + jnp.sum(jax.nn.softplus(y)),
        upper_set=aipod.Budget(2.0),
        lower_set=aipod.Budget(1.0, weights, coupling=lambda x: jnp.sum(x**2) / 4),
    )
    x = problem.upper_set.project(jnp.asarray(rng.normal(size=6)))
    return Case("budget", problem, x, jnp.asarray(rng.normal(size=6)))


def composite(seed: int = 11) -> Case:
    """A ridge head on learned features: x is a layer, y the head."""
    rng = np.random.default_rng(seed)
    inputs = jnp.asarray(rng.normal(size=(20, 3)))
    train = (inputs, jnp.sin(jnp.sum(inputs, axis=1)))
    held_out = (train[0][:10] + 0.1, train[1][:10])

    def features(x, batch):
        return jnp.tanh(batch[0] @ x)

    def head(hidden, y, batch):
        return jnp.mean((hidden @ y - batch[1]) ** 2) + 0.05 * jnp.sum(y**2)

    problem = aipod.Bilevel(
        upper=aipod.Composite(features, head),
        lower=aipod.Composite(features, head),
        lower_set=aipod.Budget(1.0),
        upper_samples=aipod.FullBatch(held_out),
        lower_samples=aipod.Minibatches(train, 10),
    )
    x = jnp.asarray(rng.normal(size=(3, 4)))
    return Case("composite", problem, x, jnp.asarray(rng.normal(size=4)))


CASES = [
    synthetic(),
    quadratic(),
    logistic(),
    nonlinear_coupling(),
    nested(),
    consensus(),
    weighted_consensus(),
    product(),
    flow(),
    budget(),
    composite(),
]
