"""Reference solutions of the gallery, by SciPy and dense linear algebra: none of our solvers.

F(x) = f(x, y*(x)) on all data is minimised by SciPy's L-BFGS over coordinates of the upper set.
y*(x) comes from Newton steps with a dense Hessian in coordinates of the lower set, and the gradient
of F from the implicit function theorem with the same Hessian. In a federation all clients have the
same x and y, so that the coordinates are those of one client.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.flatten_util import ravel_pytree

from aipod.experiments.gallery import Reference, Setting
from aipod.experiments.gallery.catalogue import ENTRIES


def directions(constraint: Any, point: Any) -> np.ndarray:
    """An orthonormal basis of the directions of a set, as columns."""
    flat, restore = ravel_pytree(point)
    if not constraint.constrained:
        return np.eye(flat.size)
    project = jax.jacobian(lambda v: ravel_pytree(constraint.tangent(restore(v)))[0])(flat)
    left, sizes, _ = np.linalg.svd(np.asarray(project))
    return left[:, sizes > 0.5]


def coordinates(setting: Setting) -> tuple[Callable, Callable, np.ndarray, np.ndarray]:
    """x from its coordinates w, y from (x, v), and the coordinates of x0 and of a start for y."""
    problem, x0, y0 = setting
    if problem.fully_federated:
        count = jax.tree.leaves(x0)[0].shape[0]
        (w0, of_x), (v0, of_y) = (
            ravel_pytree(jax.tree.map(lambda leaf: leaf[0], tree)) for tree in (x0, y0)
        )

        def spread(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)

        return lambda w: spread(of_x(w)), lambda x, v: spread(of_y(v)), w0, v0
    (origin, of_x), (flat, of_y) = ravel_pytree(problem.upper_set.project(x0)), ravel_pytree(y0)
    along_x, along_y = directions(problem.upper_set, x0), directions(problem.lower_set, y0)

    def place_y(x: Any, v: Any) -> Any:
        anchor = problem.lower_set.anchor(x, like=y0)
        return jax.tree.map(jnp.add, anchor, of_y(along_y @ v))

    return (
        lambda w: of_x(origin + along_x @ w),
        place_y,
        np.zeros(along_x.shape[1]),
        along_y.T @ flat,
    )


class Dense:
    """F and its gradient in coordinates of the upper set."""

    def __init__(self, setting: Setting) -> None:
        problem = setting.problem.expected()
        self.place_x, self.place_y, self.w0, self.v = coordinates(setting)
        batches = [
            None if samples is None else samples(jax.random.key(0))
            for samples in (problem.upper_samples, problem.lower_samples)
        ]

        def upper(w: Any, v: Any) -> Any:
            x = self.place_x(w)
            return problem.upper(x, self.place_y(x, v), batches[0])

        def lower(w: Any, v: Any) -> Any:
            x = self.place_x(w)
            return problem.lower(x, self.place_y(x, v), batches[1])

        def newton(w: Any, v: Any) -> Any:
            """Newton steps, halved until g falls, to the limits of rounding."""
            slope, bend = jax.grad(lower, argnums=1), jax.hessian(lower, argnums=1)

            def body(carry: Any) -> Any:
                v, size, count, _ = carry
                step = jnp.linalg.solve(bend(w, v), slope(w, v))
                before = lower(w, v)

                def too_far(length: Any) -> Any:
                    return (lower(w, v - length * step) > before) & (length > 1e-8)

                length = jax.lax.while_loop(too_far, lambda length: length / 2, jnp.ones(()))
                new = v - length * step
                new_size = jnp.max(jnp.abs(slope(w, new)))
                return new, new_size, count + 1, (new_size < size) | (count < 3)

            start = (v, jnp.max(jnp.abs(slope(w, v))), 0, True)
            return jax.lax.while_loop(lambda c: c[3] & (c[2] < 200), body, start)[0]

        def value(w: Any, v: Any) -> Any:
            v = newton(w, v)
            z = jnp.linalg.solve(
                jax.hessian(lower, argnums=1)(w, v), jax.grad(upper, argnums=1)(w, v)
            )
            mixed = jax.grad(lambda w: jax.grad(lower, argnums=1)(w, v) @ z)(w)
            return upper(w, v), jax.grad(upper)(w, v) - mixed, v

        self.value = jax.jit(value)

    def __call__(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope, v = self.value(jnp.asarray(w), jnp.asarray(self.v))
        if np.all(np.isfinite(v)):
            self.v = v  # the next y is near
        return float(value), np.asarray(slope)


def minimised(dense: Dense, start: np.ndarray) -> scipy.optimize.OptimizeResult:
    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 1e-15, "gtol": 1e-9}
    return scipy.optimize.minimize(dense, start, jac=True, method="L-BFGS-B", options=options)


def reference(name: str) -> tuple[Reference, float]:
    """The reference of a problem, and the size of F's gradient there relative to the start."""
    entry = ENTRIES[name]
    setting = entry.make()
    dense = Dense(setting)
    start, slope = dense(dense.w0)
    rng = np.random.default_rng(0)
    best = minimised(dense, dense.w0)
    for _ in range(entry.starts - 1):
        # Close enough to be the same basin in the eyes of somebody who starts at x0.
        shift = rng.normal(size=dense.w0.shape) * 0.3 * np.std(best.x - dense.w0)
        other = minimised(dense, dense.w0 + shift)
        best = other if other.fun < best.fun else best
    _, last = dense(best.x)
    one = dense.place_x(best.x)
    if setting.problem.fully_federated:
        one = jax.tree.map(lambda leaf: leaf[0], one)
    solution = tuple(float(f"{value:.15g}") for value in np.asarray(ravel_pytree(one)[0]))
    return (
        Reference(start, float(best.fun), solution),
        float(np.linalg.norm(last) / np.linalg.norm(slope)),
    )
