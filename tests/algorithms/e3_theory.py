"""E3-AiPOD and the constants of docs/e3-theory.md in NumPy, on random unlike clients."""

import dataclasses
from typing import NamedTuple

import numpy as np

THIRD = 4 / (3 * np.sqrt(3))  # the largest third derivative of log cosh


def norm(matrices):
    return np.linalg.norm(matrices, 2, axis=(-2, -1)).max()


def apply(matrices, vectors):
    return np.einsum(
        "mij,mj->mi", matrices, np.broadcast_to(vectors, (len(matrices), *vectors.shape[-1:]))
    )


def square(vectors):
    """The mean over clients of the squared norms."""
    return np.mean(np.sum(np.atleast_2d(vectors) ** 2, axis=-1))


class Point(NamedTuple):
    """y*, r*, u*, e*, grad F and F at some x."""

    y: np.ndarray
    r: np.ndarray
    u: np.ndarray
    e: np.ndarray
    slope: np.ndarray
    F: float


@dataclasses.dataclass(frozen=True)
class Clients:
    """Unlike clients; A = B = 0 makes them quadratic, and Q and A diagonal makes them separable.

    g_m = 1/2 y'Q y - y'(C x + t) + sum log cosh(A y + B x)
    f_m = sqrt(1 + |y - s|^2) + cos(p'x + q'y) + |x|^2 / 8
    """

    Q: np.ndarray
    C: np.ndarray
    t: np.ndarray
    A: np.ndarray
    B: np.ndarray
    s: np.ndarray
    p: np.ndarray
    q: np.ndarray

    @staticmethod
    def random(rng, kind, clients=3, n=2, k=3):
        def normal(*shape):
            return rng.normal(size=(clients, *shape))

        curvatures = np.exp(rng.uniform(0, rng.uniform(0, 3), (clients, 1, k)))
        turn = np.eye(k) if kind == "separable" else np.linalg.qr(normal(k, k))[0]
        Q = turn * curvatures @ turn.swapaxes(-1, -2)
        bend = 0.0 if kind == "quadratic" else 0.4
        A, B = bend * normal(k, k), bend * normal(k, n)
        A = A * np.eye(k) if kind == "separable" else A
        return Clients(
            Q, normal(k, n), normal(k), A, B, normal(k), 0.5 * normal(n), 0.5 * normal(k)
        )

    def at(self, x, y):
        """All first and second derivatives at the clients' own y."""
        z = apply(self.A, y) + apply(self.B, x)
        bend = (1 / np.cosh(z) ** 2)[:, :, None]
        gy = apply(self.Q, y) - apply(self.C, x) - self.t + apply(self.A.swapaxes(1, 2), np.tanh(z))
        gyy = self.Q + self.A.swapaxes(1, 2) @ (bend * self.A)
        gxy = -self.C.swapaxes(1, 2) + self.B.swapaxes(1, 2) @ (bend * self.A)
        wave = np.sin(np.sum(self.p * x, axis=-1) + np.sum(self.q * y, axis=-1))[:, None]
        fx = x / 4 - wave * self.p
        fy = (y - self.s) / np.sqrt(1 + np.sum((y - self.s) ** 2, axis=-1))[:, None] - wave * self.q
        return gy, gyy, gxy, fx, fy

    def solution(self, x):
        y = np.zeros(self.Q.shape[-1])
        for _ in range(200):
            gy, gyy = self.at(x, y)[:2]
            # Newton's step near the end; before, one with a larger Hessian, which is always safe.
            change = np.linalg.solve(
                (self.Q + self.A.swapaxes(1, 2) @ self.A).mean(axis=0), gy.mean(axis=0)
            )
            newton = np.linalg.solve(gyy.mean(axis=0), gy.mean(axis=0))
            y = y - (newton if np.linalg.norm(newton) < 1e-2 else change)
            if np.linalg.norm(change) < 1e-15 * (1 + np.linalg.norm(y)):
                break
        gy, gyy, gxy, fx, fy = self.at(x, y)
        u = -np.linalg.solve(gyy.mean(axis=0), fy.mean(axis=0))
        f = np.sqrt(1 + np.sum((y - self.s) ** 2, axis=-1)) + np.cos(self.p @ x + self.q @ y)
        slope = np.mean(fx + apply(gxy, u), axis=0)
        return Point(y, gy, u, fy + apply(gyy, u), slope, f.mean() + x @ x / 8)

    def constants(self):
        """mu, L, C, K of the page, from bounds that hold at every x and y."""
        joint = np.concatenate([self.A, self.B], axis=-1)
        row = np.linalg.norm(joint, axis=-1).max()
        mu = np.linalg.eigvalsh(self.Q).min()
        long = np.linalg.eigvalsh(self.Q + self.A.swapaxes(1, 2) @ self.A).max()
        cross = norm(self.C) + norm(self.A) * norm(self.B)
        second = THIRD * row * max(norm(self.A) ** 2, norm(self.A) * norm(self.B))
        both = np.sum(self.p**2, axis=-1) + np.sum(self.q**2, axis=-1)
        bound = (1 + np.linalg.norm(self.q, axis=-1).max()) / mu
        return mu, long, cross, 1 + both.max() + second * bound


def step(c, state, *, alpha, beta, rho, S, N):
    """One outer step of E3-AiPOD with plain averages."""
    x, y, u, r, e = state
    ys, us = np.broadcast_to(y, r.shape), np.broadcast_to(u, e.shape)
    for _ in range(S):
        ys = ys - beta * (c.at(x, ys)[0] - r)
    _, gyy, gxy, fx, fy = c.at(x, ys)
    for _ in range(N):
        us = us - rho * (fy + apply(gyy, us) - e)
    d = np.mean(fx + apply(gxy, us), axis=0)
    y, u = np.mean(ys - beta * S * r, axis=0), np.mean(us - rho * N * e, axis=0)
    return x - alpha * d, y, u, r + (y - ys) / (beta * S), e + (u - us) / (rho * N)


KINDS = ("quadratic", "separable", "short", "single")


def gamma(step_size, steps, mu, long, kind="quadratic"):
    """How V_y and V_u contract in one outer step: Lemma 2 (a), (a), (b) and (c)."""
    length = step_size * steps
    if kind == "short":
        return 7 * length * mu / 16  # for length * long <= 1 / 4
    if kind == "single":
        return length * mu  # for steps = 1
    return min(length * mu / (1 + length * mu), 1 / (1 + length * long))


@dataclasses.dataclass(frozen=True)
class Theorem:
    """Its constants; a_0 = a / alpha and c_0 = c / alpha."""

    gamma_y: float
    gamma_u: float
    a_0: float
    c_0: float
    alpha: float

    @staticmethod
    def of(c, beta, rho, S, N, *, kind):
        mu, long, cross, K = c.constants()
        eta, theta = beta * S, rho * N
        gamma_y = gamma(beta, S, mu, long, kind)
        gamma_u = gamma(rho, N, mu, long)
        c_0 = 8 * cross**2 / gamma_u
        a_0 = (
            8 * K**2 / gamma_y * ((1 + cross * theta) ** 2 + 32 * cross**2 * theta**2 / gamma_u**2)
        )
        l_y = cross / mu
        k = K * np.sqrt(1 + l_y**2)
        l_u, l_F = k / mu, k * (1 + cross / mu)
        l_r, l_e = cross * (1 + long / mu), k * (1 + long / mu)
        lag = 8 * a_0 * (l_y**2 + eta**2 * l_r**2) / gamma_y
        lag += 16 * c_0 * (l_u**2 + theta**2 * l_e**2) / gamma_u
        return Theorem(gamma_y, gamma_u, a_0, c_0, min(1 / (2 * l_F), 1 / np.sqrt(lag)))
