"""The statements of docs/e3-theory.md, with the constants that stand there, on random problems."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated
from tests.algorithms.e3_theory import KINDS, Clients, Theorem, gamma, square, step


class Parts(NamedTuple):
    """The terms of W: F is there only to be compared."""

    F: float
    V_y: float
    V_u: float


def parts(state, solution, eta, theta):
    """The terms of W at a state, measured from the solution at some x."""
    _, y, u, r, e = state
    V_y = square(y - solution.y) + eta**2 * square(r - solution.r)
    return Parts(solution.F, V_y, square(u - solution.u) + theta**2 * square(e - solution.e))


class Taken(NamedTuple):
    """A random step: before, after, after as seen from the old x, and what the lemmas speak of.

    - `sent`: the mean of |(y_hat - eta r) - (y* - eta r*)|^2.
    - `wrong`: |d - grad F|.
    """

    clients: Clients
    theorem: Theorem
    alpha: float
    theta: float
    slope: float
    before: Parts
    after: Parts
    settled: Parts
    sent: float
    wrong: float


def random_state(rng, clients, eta, theta):
    """Near to the solution and far from it, in each of the five parts by itself."""
    x = rng.normal(size=clients.p.shape[-1]) * 10 ** rng.uniform(-2, 1)
    solution = clients.solution(x)

    def off(like, unit):
        gap = like + rng.normal(size=like.shape) * 10 ** rng.uniform(-4, 1) / unit
        return gap - gap.mean(axis=0) if like.ndim == 2 else gap

    kept = off(solution.r, eta), off(solution.e, theta)
    return (x, off(solution.y, 1), off(solution.u, 1), *kept), solution


def random_case(rng):
    kind = KINDS[rng.integers(len(KINDS))]
    clients = Clients.random(rng, kind)
    S, N = (int(n) for n in rng.integers(1, 9, size=2))
    S = 1 if kind == "single" else S
    beta, rho = rng.uniform(0.1, 1, size=2) / clients.constants()[1]
    beta = beta / (4 * S) if kind == "short" else beta
    settings = {"beta": beta, "rho": rho, "S": S, "N": N}
    return clients, settings, Theorem.of(clients, **settings, kind=kind)


@functools.cache
def taken(longer=1.0, cases=100, each=10):
    rng, found = np.random.default_rng(0), []
    for _ in range(cases):
        clients, settings, theorem = random_case(rng)
        eta, theta = settings["beta"] * settings["S"], settings["rho"] * settings["N"]
        alpha = longer * theorem.alpha * rng.uniform(0.3, 1)
        for _ in range(each):
            state, there = random_state(rng, clients, eta, theta)
            new = step(clients, state, alpha=alpha, **settings)
            # The clients sent y_hat - eta r, and that is y+ - eta r+.
            sent = square(new[1] - eta * new[3] - there.y + eta * there.r)
            wrong = np.linalg.norm((state[0] - new[0]) / alpha - there.slope)
            before, settled = (parts(s, there, eta, theta) for s in (state, new))
            after = parts(new, clients.solution(new[0]), eta, theta)
            slope = there.slope @ there.slope
            where = (clients, theorem, alpha, theta, slope)
            found.append(Taken(*where, before, after, settled, sent, wrong))
    return found


def excess(t, theorem):
    """W+ - W + the promised decrease, which must not be positive, less rounding error."""

    def weighted(F, V_y, V_u):
        return F + t.alpha * (theorem.a_0 * V_y + theorem.c_0 * V_u)

    promised = t.alpha * t.slope / 2
    promised += weighted(0, theorem.gamma_y * t.before.V_y, theorem.gamma_u * t.before.V_u) / 4
    rounding = 1e-12 * weighted(abs(t.before.F), *t.before[1:])
    return weighted(*t.after) - weighted(*t.before) + promised - rounding


def test_the_theorem_holds_at_a_thousand_random_steps():
    assert len(taken()) == 1000
    assert [t for t in taken() if excess(t, t.theorem) > 0] == []


@pytest.mark.parametrize(
    ("name", "factor"), [("a_0", 1e-6), ("c_0", 1e-5), ("gamma_y", 10), ("gamma_u", 10)]
)
def test_with_a_wrong_constant_the_same_steps_break_it(name, factor):
    def wrong(theorem):
        return dataclasses.replace(theorem, **{name: factor * getattr(theorem, name)})

    assert any(excess(t, wrong(t.theorem)) > 0 for t in taken())


def test_with_longer_steps_it_breaks():
    assert any(excess(t, t.theorem) > 0 for t in taken(longer=1000.0, cases=30))


def test_the_identity_of_lemma_1():
    for t in taken():
        np.testing.assert_allclose(t.settled.V_y, t.sent, rtol=1e-9, atol=1e-20)


def test_the_contraction_of_lemma_2():
    for t in taken():
        assert t.settled.V_y <= (1 - t.theorem.gamma_y) * t.before.V_y * (1 + 1e-9)


def test_the_bounds_of_lemma_3():
    for t in taken():
        _, _, cross, K = t.clients.constants()
        far, near = np.sqrt(2 * t.before.V_y), np.sqrt(t.before.V_u)
        bound = np.sqrt(1 - t.theorem.gamma_u) * near + t.theta * K * far
        assert np.sqrt(t.settled.V_u) <= bound * (1 + 1e-9)
        bound = K * (1 + cross * t.theta) * far + cross * np.sqrt(2) * near
        assert t.wrong <= bound * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(1.0),
        optax.sgd(0.3, momentum=0.9, nesterov=True),
        optax.adam(0.1),
        aipod.restarted_momentum(),
        aipod.restarted_momentum(0.9, growth=0),
    ],
    ids=["sgd", "nesterov", "adam", "restarted", "steady"],
)
def test_optimisers_rest_only_at_0(optimizer):
    """As section 2 asks: 0 moves nothing, and a constant vector does, from any velocity."""
    still, other, same = jnp.zeros(3), jnp.array([-9.0, 1.0, 4.0]), jnp.array([1.0, -2.0, 0.0])

    def moves(feed):
        return jax.lax.scan(
            lambda state, g: optimizer.update(g, state, still)[::-1], optimizer.init(still), feed
        )[1]

    assert not moves(jnp.zeros((5, 3))).any()
    later = moves(jnp.concatenate([jnp.tile(other, (5, 1)), jnp.tile(same, (60, 1))]))[5:]
    assert (later @ same).min() < -1e-2


def linear_map(curvatures, beta, S):
    """What an outer step does to (y - y*, eta (r - r*)), a matrix for each diagonal entry."""
    clients, k = curvatures.shape
    a = (1 - beta * curvatures) ** S
    b = 1 - (1 - a) / (beta * S * curvatures)
    blocks = []
    for i in range(k):  # each coordinate is a problem of its own
        sent = np.concatenate([a[:, i : i + 1], -np.diag(b[:, i])], axis=1)
        mean = sent.mean(axis=0, keepdims=True)
        deviations = np.eye(clients) - 1 / clients
        whole = np.concatenate([mean, mean - sent])
        whole[:, 1:] = whole[:, 1:] @ deviations
        blocks.append(whole)
    return blocks


def test_the_contraction_is_right_up_to_a_factor_of_two():
    """For quadratics V_y shrinks by gamma at least, and for some by less than 2 gamma."""
    rng, ratios = np.random.default_rng(2), []
    for _ in range(1000):
        clients, S = int(rng.integers(2, 6)), int(rng.integers(1, 40))
        curvatures = np.exp(rng.uniform(-rng.uniform(0, 7), 0, size=(clients, 1)))
        (whole,) = linear_map(curvatures, 1.0, S)
        unit = np.diag([1.0] + [clients**-0.5] * clients)  # V = |delta|^2 + mean |sigma|^2
        shrunk = 1 - np.linalg.norm(unit @ whole @ np.linalg.inv(unit), 2) ** 2
        ratios.append(shrunk / gamma(1.0, S, curvatures.min(), curvatures.max()))
    assert 1 <= min(ratios) < 2


def test_noise_adds_no_more_than_is_said():
    """From the solution, where the expected V_y+ is that of the noise alone; 20,000 samples."""
    rng = np.random.default_rng(5)
    for S, beta in ((1, 1.0), (6, 0.7), (20, 0.1)):
        curvatures = rng.uniform(1e-4, 1e-2, size=(4, 3))  # flat: the bound is nearly reached
        sent = np.zeros((20_000, 4, 3))
        for _ in range(S):
            sent = sent - beta * (curvatures * sent + rng.normal(size=sent.shape) / np.sqrt(3))
        mean = sent.mean(axis=1, keepdims=True)
        V_y = np.mean(np.sum(mean**2 + (sent - mean) ** 2, axis=-1))
        assert 0.8 < V_y / (beta**2 * S) < 1.02


def test_local_steps_save_rounds_as_the_square_root_of_the_condition():
    """Rounds per factor e against L / mu: exponent 1 for S = 1, and 1/2 for S = sqrt(L / mu)."""
    rng = np.random.default_rng(3)
    conditions = 10 ** np.linspace(1, 4, 13)

    def exponent(steps, seeds=5):
        slopes = []
        for _ in range(seeds):
            rounds = []
            for condition in conditions:
                curvatures = condition ** -rng.uniform(0, 1, size=(10, 6))
                curvatures[0, 0], curvatures[1:, 0] = 1.0, 1 / condition
                curvatures[:, 1] = 1 / condition
                blocks = linear_map(curvatures, 1.0, steps(condition))
                radius = max(np.abs(np.linalg.eigvals(block)).max() for block in blocks)
                rounds.append(-1 / np.log(radius))
            slopes.append(np.polyfit(np.log(conditions), np.log(rounds), 1)[0])
        return np.mean(slopes), np.std(slopes, ddof=1) / np.sqrt(seeds) * 2.78

    (one, _), (many, width) = exponent(lambda _: 1), exponent(lambda c: int(np.ceil(np.sqrt(c))))
    assert abs(one - 1) < 0.02
    assert abs(many - 0.5) < 0.03
    assert width < 0.02


def lower(x, y, batch):
    Q, C, t, A, B = (part[0] for part in batch[:5])
    return 0.5 * y @ Q @ y - y @ (C @ x + t) + jnp.sum(jnp.log(jnp.cosh(A @ y + B @ x)))


def upper(x, y, batch):
    s, p, q = (part[0] for part in batch[5:])
    return jnp.sqrt(1 + jnp.sum((y - s) ** 2)) + jnp.cos(p @ x + q @ y) + jnp.sum(x**2) / 8


def scaffold(c, x, y, controls, beta, S):
    """One round of SCAFFOLD, option II, server rate 1: Karimireddy et al., Algorithm 1."""
    server = controls.mean(axis=0)
    ys = np.broadcast_to(y, controls.shape)
    for _ in range(S):
        ys = ys - beta * (c.at(x, ys)[0] - controls + server)
    return ys.mean(axis=0), controls - server + (y - ys) / (S * beta)


def test_the_solver_is_the_algorithm_of_the_page_and_its_lower_level_is_scaffold():
    c, S, N = Clients.random(np.random.default_rng(4), "short"), 5, 3
    data = tuple(part[:, None] for part in dataclasses.astuple(c))
    problem = federated.federate(upper, lower, data, data, batch_size=None)
    long = c.constants()[1]
    settings = {"alpha": 0.05, "beta": 0.5 / long, "rho": 0.7 / long, "S": S, "N": N}
    plain = optax.sgd(1.0)
    solver = aipod.E3AiPOD(
        upper_lr=settings["alpha"],
        lower_lr=settings["beta"],
        adjoint_lr=settings["rho"],
        lower_steps=S,
        adjoint_steps=N,
        damping=0.0,
        lower_optimizer=plain,
        adjoint_optimizer=plain,
    )
    mine = [np.ones(2), np.zeros(3), np.zeros(3), np.zeros((3, 3)), np.zeros((3, 3))]
    y, controls = mine[1], np.zeros((3, 3))
    state = solver.init(problem, jnp.ones((3, 2)), jnp.zeros((3, 3)))
    advance = eqx.filter_jit(solver.step)
    for _ in range(20):
        y, controls = scaffold(c, mine[0], y, controls, settings["beta"], S)
        mine = step(c, mine, **settings)
        state = advance(problem, state, key=jax.random.key(0))
        theirs = (state.x, state.y, state.adjoint.u, state.lower.correction)
        for ours, their in zip(mine, (*theirs, state.adjoint.correction), strict=True):
            np.testing.assert_allclose(their, np.broadcast_to(ours, their.shape), atol=1e-12)
        np.testing.assert_allclose(state.y, np.broadcast_to(y, (3, 3)), atol=1e-12)
        np.testing.assert_allclose(
            state.lower.correction, controls - controls.mean(axis=0), atol=1e-12
        )
