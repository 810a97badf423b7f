"""D-SOBA and SPARKLE, their docstrings' equations in NumPy; what gossip leaves of other methods."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from tests.algorithms.test_gossip import CLIENTS, GRAPHS, KEY, SIZE, problem, quadratics, solved

RATES = dict(upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.12)
SHARE = 0.4
ALPHA, BETA, RHO = RATES.values()


class Slopes:
    """The derivatives of the quadratic clients, row by row."""

    def __init__(self):
        above, below = ([np.asarray(a)[:, 0] for a in part] for part in quadratics())
        (self.bend, self.keep, self.wish), (self.G, self.B, self.c) = above, below

    def lower(self, x, y):
        return self.times(self.G, y) - self.times(self.B, x) - self.c

    def adjoint(self, y, z):
        return self.times(self.G, z) - self.times(self.bend, y - self.wish)

    def upper(self, x, z):
        # grad_xy g = -B'.
        return self.times(self.keep, x) + self.times(self.B.transpose(0, 2, 1), z)

    @staticmethod
    def times(matrices, rows):
        return np.einsum("mij,mj->mi", matrices, rows)


def d_soba(V, steps):
    """All three from the same point; what is returned is one step behind in y."""
    slopes = Slopes()
    x = np.ones((CLIENTS, SIZE))
    y, z, h = (np.zeros((CLIENTS, SIZE)) for _ in range(3))
    for _ in range(steps):
        last = y
        h = (1 - SHARE) * h + SHARE * slopes.upper(x, z)
        new_y = V @ (y - BETA * slopes.lower(x, y))
        new_z = V @ (z - RHO * slopes.adjoint(y, z))
        x, y, z = V @ (x - ALPHA * h), new_y, new_z
    return x, last


def diffused(V, rate):
    """v_1 = V (v_0 - rate s_0), then v_{k+1} = V (2 v_k - v_{k-1} - rate (s_k - s_{k-1}))."""
    before = None

    def step(v, slope):
        nonlocal before
        if before is None:
            new = V @ (v - rate * slope)
        else:
            new = V @ (2 * v - before[0] - rate * (slope - before[1]))
        before = v, slope
        return new

    return step


def sparkle(V, steps):
    """Exact diffusion at each level, one level after the other."""
    slopes = Slopes()
    x = np.ones((CLIENTS, SIZE))
    y, z, h = (np.zeros((CLIENTS, SIZE)) for _ in range(3))
    of_x, of_y, of_z = (diffused(V, rate) for rate in (ALPHA, BETA, RHO))
    for _ in range(steps):
        y = of_y(y, slopes.lower(x, y))
        z = of_z(z, slopes.adjoint(y, z))
        h = (1 - SHARE) * h + SHARE * slopes.upper(x, z)
        x = of_x(x, h)
    return x, y


@pytest.mark.parametrize(
    ("make", "transcribed"),
    [(aipod.DSOBA, d_soba), (aipod.SPARKLE, sparkle)],
    ids=["d-soba", "sparkle"],
)
def test_the_equations_of_the_docstrings(make, transcribed):
    graph, solver = GRAPHS["random"], make(**RATES, average=SHARE)
    start, steps = jnp.ones((CLIENTS, SIZE)), 25
    made = problem(graph)
    found = aipod.solve(made, solver, start, 0 * start, steps, key=KEY)
    x, y = transcribed(graph.mixing(), steps)
    np.testing.assert_allclose(found.x, x, atol=1e-11)
    np.testing.assert_allclose(found.y, y, atol=1e-11)
    # y, z and x one after the other, or all in one message.
    assert found.ledger.rounds == steps * (3 if make is aipod.SPARKLE else 1)


def test_sparkle_is_exact_and_d_soba_is_not():
    exact = solved(GRAPHS["exponential"], aipod.SPARKLE(**RATES), 2000, every=2000)
    assert exact.history["off"][-1] < 1e-10
    near = solved(GRAPHS["exponential"], aipod.DSOBA(**RATES), 2000, every=1000).history["off"]
    assert near[-1] > 1e-3
    assert near[-1] == pytest.approx(near[0], rel=1e-6)


INEXACT = {
    "aipod": aipod.AiPOD(**RATES, lower_steps=5),
    "e-aipod": aipod.EAiPOD(**RATES, lower_steps=5),
    "e2-aipod": aipod.E2AiPOD(**RATES, lower_steps=5),
}


@pytest.mark.parametrize("name", INEXACT)
def test_the_paper_s_methods_stop_near_a_solution(name):
    off = solved(GRAPHS["exponential"], INEXACT[name], 1500, every=500).history["off"]
    assert 1e-3 < off[-1] < 1.0


def test_e2_aipod_corrects_y_and_the_adjoint():
    """Decentralised ProxSkip below and in the middle: with x exact, so is all of it."""
    made = INEXACT["e2-aipod"]
    solver = dataclasses.replace(made, upper=aipod.EveryStep(lr=0.05))
    found = solved(GRAPHS["exponential"], solver, 2500, every=2500)
    assert found.history["off"][-1] < 1e-9
    correction = found.state.lower.correction
    assert float(jnp.max(jnp.abs(jnp.sum(correction, 0)))) < 1e-11
