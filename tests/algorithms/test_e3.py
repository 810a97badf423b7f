"""E3-AiPOD: one round per outer step, fixed points that are the stationary points, safe steps."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated
from tests.problems import quadratic, synthetic

KEY = jax.random.key(3)


@dataclasses.dataclass(frozen=True)
class Federation:
    """Heterogeneous quadratic clients and the exact solution of their bilevel problem.

    g_m = 1/2 y'Q_m y - y'(C_m x + t_m),   f_m = 1/2 ||y - s_m||^2 + 1/2 x'R_m x
    """

    problem: aipod.Bilevel
    data: tuple[np.ndarray, ...]
    x: np.ndarray
    y: np.ndarray

    def start(self):
        clients = len(self.data[0])
        return tuple(federated.replicate(jnp.zeros(v.size), clients) for v in (self.x, self.y))


def lower(x, y, batch):
    Q, C, t = (part[0] for part in batch[:3])
    return 0.5 * y @ Q @ y - y @ (C @ x + t)


def upper(x, y, batch):
    R, s = (part[0] for part in batch[3:])
    return 0.5 * jnp.sum((y - s) ** 2) + 0.5 * x @ R @ x


def federation(clients=20, n=3, m=4, seed=0, **options):
    rng = np.random.default_rng(seed)

    def positive(size):
        root = rng.normal(size=(clients, size, size))
        return root @ root.transpose(0, 2, 1) / size + 0.5 * np.eye(size)

    data = (
        positive(m),
        rng.normal(size=(clients, m, n)),
        rng.normal(size=(clients, m)),
        positive(n),
        rng.normal(size=(clients, m)),
    )
    Q, C, t, R, s = (part.mean(axis=0) for part in data)
    L, shift = np.linalg.solve(Q, C), np.linalg.solve(Q, t)  # y*(x) = L x + shift
    x = np.linalg.solve(L.T @ L + R, L.T @ (s - shift))
    batches = tuple(part[:, None] for part in data)
    problem = federated.federate(upper, lower, batches, batches, batch_size=None, **options)
    return Federation(problem, data, x, L @ x + shift)


FEDERATION = federation()


def solved(found, solver, steps, problem=None):
    return aipod.solve(problem or found.problem, solver, *found.start(), steps, key=KEY, every=50)


def error(found, solution):
    gaps = (np.asarray(solution.x) - found.x, np.asarray(solution.y) - found.y)
    return max(np.max(np.abs(gap)) for gap in gaps)


def test_the_fixed_points_are_the_exact_solution():
    """Issue: to 1e-8 in both x and y within 1,000 rounds, linearly; one round per outer step."""
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5)
    halfway, end = (solved(FEDERATION, solver, steps) for steps in (150, 300))
    assert error(FEDERATION, end) < 1e-8
    # As many digits again in the second half as in the first, or rounding.
    assert error(FEDERATION, end) < max(error(FEDERATION, halfway) ** 1.6, 1e-14)
    assert end.ledger.rounds == 300
    # x, y and u, in float64, once in each direction.
    assert end.ledger.bytes_up == end.ledger.bytes_down == 300 * 8 * (3 + 4 + 4)
    # The damping that finds itself has found that none is needed.
    assert float(end.state.adjoint.damping) == 0


class Forgetful(aipod.OneRound):
    """The lower level without its correction r."""

    def settle(self, turn, state):
        return super().settle(turn, state)[0], state


class ForgetfulAdjoint(aipod.OneRoundAdjoint):
    """The adjoint without its correction e."""

    def settle(self, turn, state):
        new = super().settle(turn, state)
        return dataclasses.replace(new, correction=state.correction)


@pytest.mark.parametrize("kind", ["r", "e"])
def test_without_a_correction_it_stalls(kind):
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5)
    if kind == "r":
        lower = Forgetful(solver.lower.lr, solver.lower.steps)
        solver = dataclasses.replace(solver, lower=lower)
    else:
        adjoint = ForgetfulAdjoint(5, solver.adjoint.lr)
        solver = dataclasses.replace(solver, adjoint=adjoint)
    assert error(FEDERATION, solved(FEDERATION, solver, 300)) > 1e-2


@pytest.mark.parametrize("case", [quadratic(), synthetic()], ids=["affine", "coupled"])
def test_affine_sets_with_and_without_coupling(case):
    """y moves with the set Y(x): the anchor's term of the hypergradient is there as well."""
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=5, adjoint_steps=5)
    solution = aipod.solve(case.problem, solver, case.x, case.y, 600, key=KEY)
    x, y = solution.feasible()
    assert float(aipod.stationarity(case.problem, x)) < 1e-16
    np.testing.assert_allclose(y, aipod.exact_lower(case.problem, x), atol=1e-8)
    assert solution.ledger.lower_projections == solution.ledger.adjoint_projections == 600


class Nesterov:
    """`restarted_momentum` in NumPy: v <- g + m v, the move is -(g + m v)."""

    def __init__(self, decay, growth):
        self.decay, self.growth, self.velocity, self.age = decay, growth, 0.0, 0

    def kept(self, age):
        return min(age / (age + self.growth), self.decay) if self.growth else self.decay

    def __call__(self, start, average):
        back = start - average
        if np.sum(self.velocity * back) < 0:
            self.velocity, self.age = 0.0, 0
        self.velocity = back + self.kept(self.age) * self.velocity
        self.age += 1
        return start - back - self.kept(self.age) * self.velocity


@pytest.mark.parametrize("share", [None, 0.4], ids=["fixed", "tempered"])
@pytest.mark.parametrize("relaxation", [None, 1.7], ids=["default", "relaxed"])
@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
def test_steps_are_the_pseudo_code_client_by_client(share, relaxation, momentum):
    """In NumPy loops over clients; no noise."""
    found = federation(clients=3, seed=1)
    Q, C, t, R, s = found.data
    S, N, rho, alpha, damping = 5 if share is None else 6, 3, 0.07, 0.1, 0.2
    longest = 0.05 if share is None else 0.4
    solver = aipod.E3AiPOD(
        upper_lr=alpha,
        lower_lr=longest if share is None else aipod.Curvature(safety=100.0, cap=longest),
        adjoint_lr=rho,
        lower_steps=S,
        adjoint_steps=N,
        damping=damping,
        lower_optimizer=None if momentum else optax.sgd(1.0),
        adjoint_optimizer=None if momentum else optax.sgd(1.0),
        relaxation=relaxation,
    )
    move_y, move_u = (Nesterov(m * momentum, growth) for m, growth in ((0.95, 3), (0.9, 0)))
    x, y, u = np.zeros(3), np.zeros(4), np.zeros(4)
    r, e = np.zeros((3, 4)), np.zeros((3, 4))
    for _ in range(4):
        ys, us, gradients, whole, halves = [], [], [], 0.0, 0.0
        beta = longest * (share or 1.0)
        for m in range(3):
            y_hat, u_hat, middle = y, u, y
            for i in range(S):
                middle = y_hat if i == S // 2 else middle
                y_hat = y_hat - beta * (Q[m] @ y_hat - C[m] @ x - t[m] - r[m])
            whole += np.sum((y_hat - y) ** 2)
            halves += np.sum((middle - y) ** 2) + np.sum((y_hat - middle) ** 2)
            for _ in range(N):
                slope = (y_hat - s[m]) + Q[m] @ u_hat + damping * u_hat
                u_hat = u_hat - rho * (slope - e[m])
            ys.append(y_hat)
            us.append(u_hat)
            gradients.append(R[m] @ x - C[m].T @ u_hat)
        ybar = np.mean([ys[m] - beta * S * r[m] for m in range(3)], axis=0)
        ubar = np.mean([us[m] - rho * N * e[m] for m in range(3)], axis=0)
        x = x - alpha * np.mean(gradients, axis=0)
        # By default r moves further with automatic steps alone: less so in noise, and where the
        # second half of the local steps goes about as far as the first.
        settled = np.interp(whole / halves, (0.9, 1.05, 1.4, 1.8), (0, 1, 1, 0))
        further = relaxation or 1 + (share or 0.0) / 2 * settled
        for m in range(3):
            r[m] += further * (ybar - ys[m]) / (beta * S)
            e[m] += (ubar - us[m]) / (rho * N)
        y, u = move_y(y, ybar), move_u(u, ubar)
        if share is not None:
            share *= np.exp(0.4 * np.clip(whole / halves - 0.75, -0.5, 0.5))
    state = solver.init(found.problem, *found.start())
    if share is not None:
        state = eqx.tree_at(lambda s: s.lower.share, state, jnp.asarray(0.4))
    for _ in range(4):
        state = solver.step(found.problem, state, key=KEY)
    for mine, theirs in ((x, state.x), (y, state.y), (u, state.adjoint.u)):
        np.testing.assert_allclose(theirs, np.broadcast_to(mine, theirs.shape), atol=1e-12)
    np.testing.assert_allclose(state.lower.correction, r, atol=1e-12)
    np.testing.assert_allclose(state.adjoint.correction, e, atol=1e-12)
    if share is None:
        assert state.lower.share is None
    else:
        assert 0.5 < share < 1  # no way back in these first steps: it grows
        np.testing.assert_allclose(state.lower.share, share, rtol=1e-12)


def test_compressed_messages_cost_half_and_lose_nothing():
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5, compression="bfloat16")
    p, start = FEDERATION.problem, FEDERATION.start()
    solution = solved(FEDERATION, solver, 400)
    assert error(FEDERATION, solution) < 1e-8
    assert 4 * solution.ledger.bytes_up == solution.ledger.bytes_down  # 16 bits for 64
    # It is really the rounded messages that were averaged: 8 bits of y are those of the exact one.
    plain = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5)
    states = [one.step(p, one.init(p, *start), key=KEY) for one in (solver, plain)]
    gap = np.max(np.abs(states[0].y - states[1].y)) / np.max(np.abs(states[1].y))
    assert 1e-6 < gap < 2**-7


@pytest.mark.parametrize("kind", ["float8", "float4"])
def test_messages_of_8_and_4_bits_lose_nothing_in_either_direction(kind):
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5, compression=kind)
    solution = solved(FEDERATION, solver, 400)
    assert error(FEDERATION, solution) < 1e-8
    np.testing.assert_allclose(np.sum(solution.state.lower.correction, axis=0), 0, atol=1e-12)
    sizes = [point.shape[1] for point in FEDERATION.start()]
    x, y = (
        {"float8": numbers, "float4": -(-numbers // 2)}[kind] + 4 for numbers in sizes
    )  # and the largest number, in 32 bits
    ledger = solution.ledger
    assert ledger.bytes_up == 400 * (x + 2 * y)
    assert ledger.bytes_down == 400 * (x + 2 * 8 * sizes[1])
    # Nobody knows anything before the first step: what clients hear first is a rounded direction.
    p, start = FEDERATION.problem, FEDERATION.start()
    heard = np.asarray(solver.step(p, solver.init(p, *start), key=KEY).upper.heard)
    assert len(np.unique(np.abs(heard) / np.max(np.abs(heard)))) > 1
    share = np.abs(heard) / np.max(np.abs(heard)) * {"float8": 448, "float4": 1}[kind]
    mantissa = np.frexp(share[share > 0])[0] * {"float8": 16, "float4": 2}[kind]
    np.testing.assert_allclose(mantissa, np.round(mantissa), atol=1e-5)


def test_absent_clients_do_not_move_a_solution():
    found = federation(clients=6, participation=0.5)
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_steps=10, adjoint_steps=5)
    solution = solved(found, solver, 200, federation(clients=6).problem)
    # Every client's corrections are right by now: with half of the clients it must stay there.
    # The upper step is left out, since a mean over half of the gradients is a noisy one.
    still = aipod.E3AiPOD(upper_lr=1e-12, lower_steps=10, adjoint_steps=5, memory=False)
    state = dataclasses.replace(solution.state, step=jnp.asarray(500, jnp.int32))
    state = still.step(found.problem, state, key=KEY)
    np.testing.assert_allclose(state.y, solution.y, atol=1e-9)


def test_curvature_is_that_of_the_steepest_client_one_step_late():
    found = federation(clients=5, seed=2)
    steepest = max(np.linalg.eigvalsh(Q)[-1] for Q in found.data[0])
    solver = aipod.E3AiPOD(upper_lr=0.1)
    problem, (x, y) = found.problem, found.start()
    first = solver.init(problem, x, y)
    after = solver.step(problem, first, key=KEY)
    np.testing.assert_allclose(after.curvature.estimate, steepest, rtol=1e-6)
    # From the second step on the estimate of the step before is used, whatever is measured now.
    late = dataclasses.replace(
        after, curvature=dataclasses.replace(after.curvature, estimate=jnp.asarray(1e6))
    )
    stuck = solver.step(problem, late, key=KEY)
    np.testing.assert_allclose(stuck.y, after.y, atol=1e-4)
    # What was seen once is forgotten slowly; without batches faster than with them.
    np.testing.assert_allclose(stuck.curvature.estimate, 0.95e6, rtol=1e-6)


def test_steps_are_tempered_by_noise_and_by_nothing_else():
    """In mere noise beta rests at 1.4 / (S l), see `tempering`; without noise at 1 / l."""
    free, noisy = synthetic(60), synthetic(60, noise=0.1)
    solver = aipod.E3AiPOD()
    calm = aipod.solve(free.problem, solver, free.x, free.y, 50, key=KEY)
    assert float(calm.state.lower.share) == 1.0

    def gap(x, y):
        return {"gap": jnp.sum((y - noisy.problem.lower_set.project(x, x)) ** 2)}

    def run(solver):
        return aipod.solve(
            noisy.problem, solver, noisy.x, noisy.y, 400, key=KEY, record=gap, every=1
        )

    tempered, plain = run(solver), run(aipod.E3AiPOD(lower_lr=aipod.Curvature(tempered=False)))
    # The share wanders by a few per cent; with 57 directions R has an error of about 0.1.
    assert 0.6 < 20 * float(tempered.state.lower.share) / 1.4 < 1.7
    ratio = plain.history["gap"][-200:].mean() / tempered.history["gap"][-200:].mean()
    # beta / (2 - beta) of the noise remains: 1 against 0.036.
    assert 15 < ratio < 45


def test_the_damping_covers_a_lower_level_that_bends_down():
    """A lower Hessian with a negative eigenvalue: undamped, a warm adjoint grows without bound."""
    bends = jnp.array([1.0, -0.3])

    def objective(x, y, _):
        return 0.5 * jnp.sum(bends * y**2) + 0.25 * jnp.sum(y**4) - jnp.sum(x * y)

    problem = aipod.Bilevel(lambda x, y, _: jnp.sum(y) + 0.5 * jnp.sum(x**2), objective)
    # y is held near 0, where the second direction bends down.
    options = {"upper_lr": 1e-9, "lower_lr": 1e-9, "adjoint_lr": 0.5, "lower_steps": 1}
    x, y = jnp.full(2, 1e-6), jnp.zeros(2)
    grown = aipod.solve(
        problem, aipod.E3AiPOD(**options, damping=0.0), x, y, 120, key=KEY, throw=False
    )
    held = aipod.solve(problem, aipod.E3AiPOD(**options), x, y, 120, key=KEY)
    assert np.max(np.abs(grown.state.adjoint.u)) > 1e6
    assert np.max(np.abs(held.state.adjoint.u)) < 100
    assert 0.3 < float(held.state.adjoint.damping) <= 0.6


def test_fading_adam_fades():
    steps = []
    state = aipod.fading_adam(0.01, fade=4.0).init(jnp.zeros(1))
    for _ in range(13):
        change, state = aipod.fading_adam(0.01, fade=4.0).update(jnp.ones(1), state)
        steps.append(float(change[0]))
    np.testing.assert_allclose(steps, [-0.01 / np.sqrt(1 + k / 4) for k in range(13)], rtol=1e-6)


def mixed_compression():
    return aipod.Alternating(
        lower=aipod.ProxSkip(prob=None, compression="float16"),
        adjoint=aipod.Neumann(),
        upper=aipod.EveryStep(lr=0.1),
    )


def outside_a_federation():
    case = quadratic()
    return aipod.E3AiPOD(compression="float16").init(case.problem, case.x, case.y)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: aipod.E3AiPOD(compression="int4"),
            "compression must be None, 'bfloat16', 'float16', 'float8' or 'float4'",
        ),
        (lambda: aipod.ProxSkip(compression="float16"), "prob=None"),
        (lambda: aipod.ProxSkipAdjoint(compression="float16"), "prob=None"),
        (lambda: aipod.ProxSkipAdjoint(prob=None), "set warm=True"),
        (lambda: aipod.ProxSkipAdjoint(damping=None), "give a number"),
        (lambda: aipod.E3AiPOD(damping=-1.0), "damping must be 0 or more"),
        (lambda: aipod.E3AiPOD(upper_lr=0.1, upper_optimizer=aipod.fading_adam()), "one of the"),
        (lambda: aipod.fading_adam(0.0), "rate must be positive"),
        (mixed_compression, "compression must be the same"),
        (outside_a_federation, "compression is for federations"),
    ],
)
def test_bad_arguments_get_one_clear_sentence(act, message):
    with pytest.raises(ValueError, match=message):
        act()
