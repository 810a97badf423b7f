"""One step of each solver against the paper's equations, written out in NumPy with a basis V2.

The transcription uses the null-space basis and the pseudo-inverse of the paper, none of which the
library forms, and the library's own draws: samples and coins come from the same keys.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import aipod
from aipod._misc.keys import coins, subkey, subkeys

SIZE, ROWS = 6, 2
KEY = jax.random.key(7)


class Paper:
    """A quadratic problem with random Hessians, and the paper's quantities for it.

    f = 1/2 ||y - t||^2 + sin(a'x) + x'Ky + xi'(x, y);   g = 1/2 y'G y + x'Cy + phi'y + ...
    """

    def __init__(self, *, coupled: bool) -> None:
        rng = np.random.default_rng(3)
        root = rng.standard_normal((SIZE, SIZE))
        self.G = root @ root.T / SIZE + np.eye(SIZE)
        self.C, self.K = rng.standard_normal((2, SIZE, SIZE)) / 3
        self.t, self.a = rng.standard_normal((2, SIZE))
        rows = rng.standard_normal((ROWS, SIZE))
        self.A = np.vstack([rows, rows[:1] + rows[1:]])  # rank 2, three rows
        self.c = np.append(self.A[:2] @ np.ones(SIZE), self.A[2] @ np.ones(SIZE))
        self.W = rng.standard_normal((ROWS, SIZE)) / 3
        self.B = rng.standard_normal((1, SIZE))
        self.e = np.array([0.5])
        self.coupled = coupled
        self.V2 = scipy.linalg.null_space(self.A)
        self.A_plus = np.linalg.pinv(self.A)
        self.P_x = np.eye(SIZE) - np.linalg.pinv(self.B) @ self.B

    def h(self, x):
        value = jnp.tanh(self.W @ x) if self.coupled else jnp.zeros(ROWS)
        return jnp.append(value, value[0] + value[1])

    def grad_h(self, x):
        if not self.coupled:
            return np.zeros((3, SIZE))
        first = (1 - np.tanh(self.W @ x) ** 2)[:, None] * self.W
        return np.vstack([first, first[:1] + first[1:]])

    def problem(self) -> aipod.Bilevel:
        def upper(x, y, xi):
            noise = xi[0] @ x + xi[1] @ y
            return 0.5 * jnp.sum((y - self.t) ** 2) + jnp.sin(self.a @ x) + x @ self.K @ y + noise

        def lower(x, y, phi):
            hessian, cross, noise = phi
            return 0.5 * y @ (self.G + hessian) @ y + x @ (self.C + cross) @ y + noise @ y

        def lower_samples(key):
            first, second, third = jax.random.split(key, 3)
            root = 0.1 * jax.random.normal(first, (SIZE, SIZE))
            cross = 0.1 * jax.random.normal(second, (SIZE, SIZE))
            return root + root.T, cross, 0.1 * jax.random.normal(third, (SIZE,))

        coupling = self.h if self.coupled else None
        return aipod.Bilevel(
            upper,
            lower,
            aipod.Affine(self.B, self.e),
            aipod.Affine(self.A, self.c, coupling=coupling),
            lambda key: 0.1 * jax.random.normal(key, (2, SIZE)),
            lower_samples,
        )

    def project_y(self, y, x):
        shift = np.asarray(self.h(x)) - self.c
        return self.V2 @ self.V2.T @ y - self.A_plus @ shift

    def project_x(self, x):
        return self.P_x @ x + np.linalg.pinv(self.B) @ self.e

    def g_y(self, x, y, phi):
        return (self.G + phi[0]) @ y + (self.C + phi[1]).T @ x + phi[2]

    def g_yy(self, phi):
        return self.G + phi[0]

    def g_xy(self, phi):
        return self.C + phi[1]

    def f_x(self, x, y, xi):
        return np.cos(self.a @ x) * self.a + self.K @ y + xi[0]

    def f_y(self, x, y, xi):
        return y - self.t + self.K.T @ x + xi[1]

    def w(self, x, inverse, phi, f_y):
        """`NS-wk` with `inverse` in place of the bracket between V2 and V2'."""
        through = self.grad_h(x).T @ self.A_plus.T
        reduced = self.V2 @ inverse @ self.V2.T
        return (-through + (through @ self.g_yy(phi) - self.g_xy(phi)) @ reduced) @ f_y


class Draws:
    """The samples and coins of outer step k, as NumPy arrays."""

    def __init__(self, problem: aipod.Bilevel, k: int) -> None:
        keys = subkeys(jax.random.fold_in(KEY, k), 6)
        self.lower_key, self.adjoint_key, self.upper_key, xi_key, phi_key, _ = keys
        self.problem = problem
        self.xi, self.phi = self.upper(xi_key), self.lower(phi_key)

    def upper(self, key):
        return jax.tree.map(np.asarray, self.problem.upper_samples(key))

    def lower(self, key):
        return jax.tree.map(np.asarray, self.problem.lower_samples(key))

    def loop(self, key, steps, prob):
        keys = subkeys(key, steps + 1)
        return np.asarray(coins(keys[0], prob, steps)), keys[1:]


def lower_proxskip(paper, draws, x, y, r, *, beta, prob, steps):
    """E-AiPOD_low: `update-z`, `update-yz1`, `update-yz2`."""
    coins, keys = draws.loop(draws.lower_key, steps, prob)
    for coin, key in zip(coins, keys, strict=True):
        y_hat = y - beta * (paper.g_y(x, y, draws.lower(key)) - r)
        y = paper.project_y(y_hat - beta * r / prob, x) if coin else y_hat
        r = r + prob * (y - y_hat) / beta
    return y, r, int(coins.sum())


def neumann(paper, draws, x, y, *, eta, terms, random):
    """w^k by the series of `NS-wk`, in the coordinates of V2."""
    key = draws.adjoint_key
    identity = np.eye(paper.V2.shape[1])
    products = [identity]
    for n in range(1, terms):
        phi = draws.lower(subkey(key, n))
        factor = identity - eta * paper.V2.T @ paper.g_yy(phi) @ paper.V2
        products.append(factor @ products[-1])
    if random:
        drawn = int(jax.random.randint(subkey(key, 0), (), 0, terms))
        inverse = eta * terms * products[drawn]
    else:
        inverse = eta * sum(products)
    return paper.w(x, inverse, draws.phi, paper.f_y(x, y, draws.xi))


@pytest.mark.parametrize("random", [False, True], ids=["sum", "draw"])
@pytest.mark.parametrize("coupled", [False, True], ids=["uncoupled", "coupled"])
def test_aipod_is_the_paper(coupled, random):
    paper = Paper(coupled=coupled)
    problem = paper.problem()
    alpha, beta, eta, S, N = 0.05, 0.1, 0.2, 4, 6
    solver = aipod.AiPOD(
        upper_lr=alpha,
        lower_lr=beta,
        lower_steps=S,
        adjoint_steps=N,
        adjoint_lr=eta,
        adjoint_random=random,
    )
    x, y = paper.project_x(np.ones(SIZE)), np.zeros(SIZE)
    state = solver.init(problem, jnp.asarray(x), jnp.asarray(y))
    for k in range(3):
        draws = Draws(problem, k)
        _, keys = draws.loop(draws.lower_key, S, 1.0)
        for key in keys:  # update-ys
            y = paper.project_y(y - beta * paper.g_y(x, y, draws.lower(key)), x)
        w = neumann(paper, draws, x, y, eta=eta, terms=N, random=random)
        x = paper.project_x(x - alpha * (paper.f_x(x, y, draws.xi) + w))
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.x, x, atol=1e-12)


@pytest.mark.parametrize("coupled", [False, True], ids=["uncoupled", "coupled"])
@pytest.mark.parametrize(("T", "delta"), [(1, 1.0), (3, 1.0), (3, 1.7)])
def test_e_aipod_is_the_paper(coupled, T, delta):
    paper = Paper(coupled=coupled)
    problem = paper.problem()
    alpha, beta, eta, p, S, N = 0.05, 0.1, 0.2, 0.4, 5, 4
    solver = aipod.EAiPOD(
        upper_lr=alpha,
        lower_lr=beta,
        lower_prob=p,
        lower_steps=S,
        upper_steps=T,
        extrapolation=delta,
        adjoint_steps=N,
        adjoint_lr=eta,
    )
    x, y, r = paper.project_x(np.ones(SIZE)), np.zeros(SIZE), np.zeros(SIZE)
    state = solver.init(problem, jnp.asarray(x), jnp.asarray(y))
    projections = 0
    for k in range(4):
        draws = Draws(problem, k)
        y, r, used = lower_proxskip(paper, draws, x, y, r, beta=beta, prob=p, steps=S)
        projections += used
        w = neumann(paper, draws, x, y, eta=eta, terms=N, random=False)
        fresh = [draws.upper(key) for key in subkeys(draws.upper_key, T)[1:]]
        x_t = x
        for xi in [draws.xi, *fresh]:  # update-xkt, NS-hf-t
            x_t = x_t - alpha * (paper.f_x(x_t, y, xi) + w)
        x = (1 - delta) * x + delta * paper.project_x(x_t)  # delta-x
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.lower.correction, r, atol=1e-11)
        np.testing.assert_allclose(state.x, x, atol=1e-12)
    assert int(state.counts.lower_projections) == projections
    assert 0 < projections < 4 * S


@pytest.mark.parametrize("T", [1, 3])
def test_e2_aipod_is_the_paper(T):
    paper = Paper(coupled=False)
    problem = paper.problem()
    alpha, beta, rho, p, q, S, N = 0.05, 0.1, 0.15, 0.4, 0.5, 5, 6
    solver = aipod.E2AiPOD(
        upper_lr=alpha,
        lower_lr=beta,
        adjoint_lr=rho,
        lower_prob=p,
        adjoint_prob=q,
        lower_steps=S,
        adjoint_steps=N,
        upper_steps=T,
    )
    x, y, r = paper.project_x(np.ones(SIZE)), np.zeros(SIZE), np.zeros(SIZE)
    state = solver.init(problem, jnp.asarray(x), jnp.asarray(y))
    adjoint_projections = 0
    for k in range(5):
        draws = Draws(problem, k)
        y, r, _ = lower_proxskip(paper, draws, x, y, r, beta=beta, prob=p, steps=S)
        u, e = np.zeros(SIZE), np.zeros(SIZE)
        coins, keys = draws.loop(draws.adjoint_key, N, q)
        adjoint_projections += int(coins.sum())
        for coin, key in zip(coins, keys, strict=True):
            upper_key, lower_key = subkeys(key, 2)
            xi, phi = draws.upper(upper_key), draws.lower(lower_key)
            u_hat = u - rho * (paper.f_y(x, y, xi) + paper.g_yy(phi) @ u - e)
            u = paper.V2 @ paper.V2.T @ (u_hat - rho * e / q) if coin else u_hat
            e = e + q * (u - u_hat) / rho
        x = x - alpha * (paper.f_x(x, y, draws.xi) + paper.g_xy(draws.phi) @ u)  # WS-df
        if k % T == 0:
            x = paper.project_x(x)  # WS-x
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.x, x, atol=1e-12)
    assert int(state.counts.adjoint_projections) == adjoint_projections
    assert int(state.counts.upper_projections) == len([k for k in range(5) if k % T == 0])


def test_aipod_without_constraints_is_alternating_sgd():
    """Ten lines of NumPy, no sets anywhere."""
    paper = Paper(coupled=False)
    constrained = paper.problem()
    problem = aipod.Bilevel(
        constrained.upper,
        constrained.lower,
        upper_samples=constrained.upper_samples,
        lower_samples=constrained.lower_samples,
    )
    solver = aipod.AiPOD(
        upper_lr=0.05, lower_lr=0.1, lower_steps=3, adjoint_steps=5, adjoint_lr=0.2
    )
    x, y = np.ones(SIZE), np.zeros(SIZE)
    state = solver.init(problem, jnp.asarray(x), jnp.asarray(y))
    for k in range(3):
        draws = Draws(problem, k)
        for key in draws.loop(draws.lower_key, 3, 1.0)[1]:
            y = y - 0.1 * paper.g_y(x, y, draws.lower(key))
        v = paper.f_y(x, y, draws.xi)
        z = 0.2 * v
        for n in range(1, 5):
            v = v - 0.2 * paper.g_yy(draws.lower(subkey(draws.adjoint_key, n))) @ v
            z = z + 0.2 * v
        x = x - 0.05 * (paper.f_x(x, y, draws.xi) - paper.g_xy(draws.phi) @ z)
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.x, x, atol=1e-12)
