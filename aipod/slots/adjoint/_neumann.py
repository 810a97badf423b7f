"""How z = (P G P)^+ P grad_y f is found, with G = grad_yy g and P the projection on Ker A.

z is the paper's V2 (V2' G V2)^-1 V2' grad_y f without the basis V2: the vector of Ker A with
P G z = P grad_y f.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from aipod._misc.keys import subkey
from aipod._misc.tree import axpy, cast_like
from aipod.problem._bilevel import Bilevel
from aipod.problem._samplers import batch_size, draw
from aipod.slots._cost import Cost, rounds_of
from aipod.slots._turn import Turn
from aipod.stepsize._curvature import hessian_product
from aipod.stepsize._stepsize import Curvature, StepSize, check_rate, check_steps


class AbstractAdjoint(eqx.Module):
    """The slot between the lower and the upper level."""

    @property
    @abc.abstractmethod
    def rate(self) -> StepSize | None:
        """The step size, where the method has one."""

    def init(self, problem: Bilevel, x: PyTree, y: PyTree) -> PyTree:
        """What is kept from one outer step to the next."""
        return None

    @abc.abstractmethod
    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        """z at (x, y), the state for the next outer step, and what it cost.

        `upper_batch` is the sample that x will see as well.
        """

    @property
    def wire(self) -> str | None:
        """The type of the numbers that a client sends; None for their own."""
        return None

    @property
    def draws(self) -> tuple[int, int]:
        """Batches of the lower and of the upper level that one outer step draws, where known."""
        return 0, 0

    @property
    def deferred(self) -> bool:
        """Whether a projection is left to `settle`, at the end of the outer step."""
        return False

    def settle(self, turn: Turn, state: PyTree) -> PyTree:
        """The state after the projection that was left to the end of the outer step."""
        return state


def _upper_gradient(problem: Bilevel, x: PyTree, y: PyTree, batch: Any) -> PyTree:
    return jax.grad(problem.upper, argnums=1)(x, y, batch)


def adjoint_cost(problem: Bilevel, projections: Array | int, **samples: Array | int) -> Cost:
    """Of an adjoint whose every projection averages one vector of the size of y."""
    rounds = rounds_of(problem.lower_set, projections)
    return Cost(projections, rounds=rounds, sent_y=rounds, **samples)


def check_damping(damping: float) -> None:
    if not damping >= 0:
        raise ValueError(f"damping must be 0 or more, got {damping}.")


class Neumann(AbstractAdjoint):
    """A truncated Neumann series, projected after every factor (`NS-wk`).

        v_0 = P grad_y f,   v_n = P (v_{n-1} - eta G v_{n-1}),   z = eta sum_{n < N} v_n

    every factor with a fresh sample. With `random`, the paper's own estimate: N' uniform in
    {0, ..., N - 1} and z = eta N v_{N'}, unbiased for the sum and about half its cost, at many
    times its variance.

    **Arguments:**

    - `steps` [N]: the number of terms.
    - `lr` [eta = c~ / l_g1]: at most 1 / l_g1, the largest curvature of g.
    - `random`: the paper's random draw instead of the sum.
    - `damping`: a Tikhonov term, G + damping I, for lower levels that are not convex.
    - `local`: leave every projection out. In a federation each client then inverts its own
        Hessian, without communication and, where clients differ, with a bias.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Neumann(50))
        ```
    """

    steps: int = eqx.field(static=True, default=10)
    lr: StepSize = Curvature()
    random: bool = eqx.field(static=True, default=False)
    damping: float = 0.0
    local: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_steps(self.steps, "adjoint_steps (N)")
        check_rate(self.lr, "adjoint_lr")
        check_damping(self.damping)

    @property
    def rate(self) -> StepSize:
        return self.lr

    @property
    def draws(self) -> tuple[int, int]:
        return self.steps - 1, 0

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, rates, key = turn
        eta = rates(self.lr)
        objective, samples = problem.lower_at(x, draws=self.steps)
        lower_set = problem.lower_set
        gradient = _upper_gradient(problem, x, y, upper_batch)

        def average(n: Array | int, v: PyTree) -> PyTree:
            if self.local:
                return cast_like(v, y)
            chosen = lower_set.for_round(subkey(key, self.steps + n))
            return cast_like(chosen.tangent(v), y)

        first = average(0, lower_set.riesz(gradient))

        def factor(n: Array, v: PyTree) -> PyTree:
            batch = draw(samples, subkey(key, n))
            product = hessian_product(lambda t: objective(t, batch), y, v, self.damping)
            return average(n, axpy(v, -eta, lower_set.riesz(product)))

        if self.random:
            factors = jax.random.randint(subkey(key, 0), (), 0, self.steps)
            last = jax.lax.fori_loop(1, factors + 1, factor, first)
            z = optax.tree.scale(eta * self.steps, last)
        else:
            factors = jnp.asarray(self.steps - 1, jnp.int32)

            def body(n: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                v = factor(n, carry[0])
                return v, optax.tree.add(carry[1], v)

            _, total = jax.lax.fori_loop(1, self.steps, body, (first, first))
            z = optax.tree.scale(eta, total)
        spent = factors * batch_size(problem.lower_samples)
        projections = 0 if self.local else factors + 1
        return z, state, adjoint_cost(problem, projections, lower_samples=spent)


class ConjugateGradient(AbstractAdjoint):
    """Conjugate gradients on P G P by Lineax, on one sample of G.

    **Arguments:**

    - `rtol`, `atol`: when to stop.
    - `max_steps`: at most so many products with G; default ten for each unknown.
    - `damping`: a Tikhonov term, G + damping I.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.ConjugateGradient(rtol=1e-12))
        ```
    """

    rtol: float = 1e-6
    atol: float = 0.0
    max_steps: int | None = eqx.field(static=True, default=None)
    damping: float = 0.0

    def __check_init__(self) -> None:
        if not self.rtol >= 0 or not self.atol >= 0:
            raise ValueError("ConjugateGradient: rtol and atol must be 0 or more.")
        if self.max_steps is not None:
            check_steps(self.max_steps, "ConjugateGradient: max_steps")
        check_damping(self.damping)

    @property
    def rate(self) -> None:
        return None

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, _, key = turn
        batch = draw(problem.lower_samples, key)
        gradient = _upper_gradient(problem, x, y, upper_batch)
        z, steps = solve_projected(
            lambda t: problem.lower(x, t, batch),
            problem,
            y,
            gradient,
            rtol=self.rtol,
            atol=self.atol,
            max_steps=self.max_steps,
            damping=self.damping,
        )
        spent = batch_size(problem.lower_samples)
        return z, state, adjoint_cost(problem, 2 * steps + 2, lower_samples=spent)


def solve_projected(
    objective: Callable[[PyTree], Array],
    problem: Bilevel,
    y: PyTree,
    gradient: PyTree,
    *,
    rtol: float,
    atol: float,
    max_steps: int | None,
    damping: float = 0.0,
) -> tuple[PyTree, Array]:
    """z in Ker A with P' G z = P' gradient, G the Hessian of `objective` at y; and its steps."""
    lower_set = problem.lower_set
    hessian = jax.linearize(jax.grad(objective), y)[1]
    right = lower_set.cotangent(gradient)
    along = lower_set.tangent(right)
    size = optax.tree.norm(right)
    # Lineax tests both the residual and the step against one tolerance. With the right-hand side
    # and the curvature along it scaled to 1 that tolerance means the same for every problem.
    curvature = jnp.abs(optax.tree.vdot(along, hessian(along))) + damping * size**2
    scale = jnp.where(curvature > 0, curvature / jnp.where(size > 0, size, 1.0) ** 2, 1.0)

    def matvec(v: PyTree) -> PyTree:
        inside = lower_set.tangent(v)
        outside = optax.tree.sub(v, inside)
        product = optax.tree.add_scale(hessian(inside), damping, inside)
        # The identity off Ker A keeps the operator regular where rounding leaves it: without it
        # a converged iteration meets directions of zero curvature and returns NaN.
        return optax.tree.add(
            optax.tree.scale(1 / scale, lower_set.cotangent(product)),
            optax.tree.sub(outside, lower_set.cotangent(outside)),
        )

    operator = lx.FunctionLinearOperator(
        matvec, jax.eval_shape(lambda: y), lx.positive_semidefinite_tag
    )
    unit = jnp.where(size > 0, size, 1.0)
    floor = 50 * float(jnp.finfo(size.dtype).eps)
    if max_steps is None:
        max_steps = 10 * sum(leaf.size for leaf in jax.tree.leaves(y))
    solver = lx.CG(
        rtol=0.0,
        atol=jnp.maximum(jnp.maximum(rtol, atol / unit), floor),
        norm=optax.tree.norm,
        max_steps=max_steps,
    )
    solution = lx.linear_solve(operator, optax.tree.scale(1 / unit, right), solver, throw=False)
    z = optax.tree.scale(unit / scale, lower_set.tangent(solution.value))
    return z, solution.stats["num_steps"]


class Zero(AbstractAdjoint):
    """z = 0: what x does to y is not seen. For methods that ignore the nesting.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Zero())  # grad_x f alone
        ```
    """

    @property
    def rate(self) -> None:
        return None

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        return optax.tree.zeros_like(turn.y), state, Cost()


class Direct(AbstractAdjoint):
    """A dense solve with the Hessian of one sample: exact, and only for small problems.

    !!! example
        ```python
        aipod.hypergradient(problem, x, y, adjoint=aipod.Direct())
        ```
    """

    damping: float = 0.0

    def __check_init__(self) -> None:
        check_damping(self.damping)

    @property
    def rate(self) -> None:
        return None

    def solve(self, turn: Turn, upper_batch: Any, state: PyTree) -> tuple[PyTree, PyTree, Cost]:
        problem, x, y, _, key = turn
        batch = draw(problem.lower_samples, key)
        flat, restore = ravel_pytree(y)
        identity = jnp.eye(flat.size, dtype=flat.dtype)

        def project(v: Array) -> Array:
            return ravel_pytree(problem.lower_set.tangent(restore(v)))[0]

        basis = jax.vmap(project, out_axes=1)(identity)
        hessian = jax.hessian(lambda t: problem.lower(x, restore(t), batch))(flat)
        hessian = hessian + self.damping * identity
        off = identity - basis
        # Off Ker A the matrix is filled with something positive, which the projected right-hand
        # side never meets: one regular system stands for the singular one.
        matrix = basis.T @ hessian @ basis + off.T @ off
        gradient = ravel_pytree(_upper_gradient(problem, x, y, upper_batch))[0]
        z = basis @ jnp.linalg.solve(matrix, basis.T @ gradient)
        spent = batch_size(problem.lower_samples)
        return restore(z), state, adjoint_cost(problem, flat.size + 1, lower_samples=spent)
