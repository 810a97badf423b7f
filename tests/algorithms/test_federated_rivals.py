"""Federated rivals: their docstrings' equations in NumPy, rounds and bytes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod._misc.keys import round_key, subkey
from aipod.algorithms._step_keys import keys_of
from aipod.federated import federate, replicate

KEY = jax.random.key(0)
CLIENTS, DX, DY = 3, 2, 4
WEIGHTS = np.array([0.5, 0.3, 0.2])


class Quadratics:
    """Unlike clients: the sums that a client holds in one batch, and their derivatives."""

    def __init__(self):
        rng = np.random.default_rng(3)
        root = rng.normal(size=(CLIENTS, DY, DY))
        self.G = np.einsum("mij,mkj->mik", root, root) / DY + np.eye(DY)
        self.B = rng.normal(size=(CLIENTS, DY, DX))
        self.c, self.wish = rng.normal(size=(2, CLIENTS, DY))

    def federation(self, **more):
        def lower(x, y, batch):
            G, B, c = (part[0] for part in batch)
            return 0.5 * y @ G @ y - y @ (B @ x + c)

        def upper(x, y, batch):
            return 0.5 * jnp.sum((y - batch[0][0]) ** 2) + 0.1 * jnp.sum(x**2)

        below = [tuple(a[m : m + 1] for a in (self.G, self.B, self.c)) for m in range(CLIENTS)]
        above = [(self.wish[m : m + 1],) for m in range(CLIENTS)]
        return federate(upper, lower, above, below, batch_size=None, **more)

    def lower(self, m, x, y):
        return self.G[m] @ y - self.B[m] @ x - self.c[m]

    def adjoint(self, m, y, z):
        return self.G[m] @ z - (y - self.wish[m])

    def upper(self, m, x, z):
        # grad_xy g = -B'.
        return 0.2 * x + self.B[m].T @ z


DATA = Quadratics()


def start():
    return replicate(jnp.full(DX, 0.3), CLIENTS), replicate(jnp.full(DY, -0.2), CLIENTS)


def same(found, wanted):
    """For every client."""
    np.testing.assert_allclose(found, np.stack([wanted] * CLIENTS), rtol=0, atol=1e-12)


def simfbo(x, y, z, *, eta, gamma, tau, radius):
    """One outer step of the docstring; eta and gamma are those of x, y and z."""
    q = [0.0, 0.0, 0.0]
    for m in range(CLIENTS):
        mine = [x, y, z]
        for _ in range(tau):
            a, b, c = mine
            along = DATA.upper(m, a, c), DATA.lower(m, a, b), DATA.adjoint(m, b, c)
            q = [s + WEIGHTS[m] * d for s, d in zip(q, along, strict=True)]
            mine = [v - e * d for v, e, d in zip(mine, eta, along, strict=True)]
    x, y, z = (v - g * s for v, g, s in zip((x, y, z), gamma, q, strict=True))
    return x, y, min(1.0, radius / np.linalg.norm(z)) * z


SERVER = {"upper_server_lr": 0.08, "lower_server_lr": 0.03, "adjoint_server_lr": 0.07}


@pytest.mark.parametrize(
    ("server", "radius"), [({}, 1e9), (SERVER, 1e9), (SERVER, 0.2)], ids=["mean", "server", "ball"]
)
def test_simfbo_client_by_client(server, radius):
    eta, tau = (0.05, 0.1, 0.12), 3
    solver = aipod.SimFBO(
        upper_lr=eta[0],
        lower_lr=eta[1],
        adjoint_lr=eta[2],
        local_steps=tau,
        radius=None if radius > 1 else radius,
        **server,
    )
    problem, steps = DATA.federation(weights=WEIGHTS), 4
    state = solver.init(problem, *start())
    x, y, z = np.full(DX, 0.3), np.full(DY, -0.2), np.zeros(DY)
    gamma = tuple(server.values()) or eta
    for _ in range(steps):
        x, y, z = simfbo(x, y, z, eta=eta, gamma=gamma, tau=tau, radius=radius)
        state = solver.step(problem, state, key=KEY)
        for found, wanted in ((state.x, x), (state.y, y), (state.adjoint.z, z)):
            same(found, wanted)
    assert radius > 1 or np.linalg.norm(z) == pytest.approx(radius)


def test_simfbo_sends_everything_in_one_round():
    """Up and down: one x, and y and z, in every outer step. Each client draws 3 tau and 2 tau."""
    solver = aipod.SimFBO(upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, local_steps=3)
    ledger = aipod.solve(DATA.federation(), solver, *start(), 4, key=KEY).ledger
    assert ledger.rounds == 4
    assert ledger.bytes_up == ledger.bytes_down == 4 * 8 * (DX + 2 * DY)
    assert (ledger.lower_samples, ledger.upper_samples) == (4 * 9 * CLIENTS, 4 * 6 * CLIENTS)


def fedbioacc(x, y, z, v, last, *, eta, tau, a):
    """One outer step of the docstring; v is the mean of the momenta, last each client's point."""

    def directions(m, point):
        x, y, z = point
        return DATA.upper(m, x, z), DATA.lower(m, x, y), DATA.adjoint(m, y, z)

    points, momenta, lasts = [], [], []
    for m in range(CLIENTS):
        mine, speed, before = [x, y, z], v, None if last is None else last[m]
        for _ in range(tau):
            along = directions(m, mine)
            if before is not None:
                triples = zip(along, speed, directions(m, before), strict=True)
                along = [new + (1 - a) * (s - old) for new, s, old in triples]
            speed, before = along, mine
            mine = [p - e * s for p, e, s in zip(mine, eta, speed, strict=True)]
        points.append(mine)
        momenta.append(speed)
        lasts.append(before)

    def mean(rows):
        return [sum(w * r[k] for w, r in zip(WEIGHTS, rows, strict=True)) for k in range(3)]

    return (*mean(points), mean(momenta), lasts)


@pytest.mark.parametrize("tau", [1, 3])
def test_fedbioacc_client_by_client(tau):
    eta, a = (0.05, 0.1, 0.12), 0.3
    solver = aipod.FedBiOAcc(
        upper_lr=eta[0], lower_lr=eta[1], adjoint_lr=eta[2], local_steps=tau, momentum=a
    )
    problem = DATA.federation(weights=WEIGHTS)
    state = solver.init(problem, *start())
    x, y, z, v, last = np.full(DX, 0.3), np.full(DY, -0.2), np.zeros(DY), None, None
    for _ in range(4):
        x, y, z, v, last = fedbioacc(x, y, z, v, last, eta=eta, tau=tau, a=a)
        state = solver.step(problem, state, key=KEY)
        for found, wanted in ((state.x, x), (state.y, y), (state.adjoint.z, z)):
            same(found, wanted)
    ledger = aipod.solve(problem, solver, *start(), 4, key=KEY).ledger
    # Momenta travel too, unless they are what the points tell.
    assert (ledger.rounds, ledger.bytes_up) == (4, 4 * 8 * (DX + 2 * DY) * (1 if tau == 1 else 2))


def f2sa(x, y, u, *, eta, gamma, tau, delta):
    """One outer step of the docstring; eta and gamma are those of x, y and u."""
    q = [0.0, 0.0, 0.0]
    for m in range(CLIENTS):
        mine = [x, y, u]
        for _ in range(tau):
            a, b, c = mine
            # grad_x g = -B' y.
            through = (-DATA.B[m].T @ c + DATA.B[m].T @ b) / delta
            mixed = DATA.lower(m, a, c) + delta * (c - DATA.wish[m])
            along = 0.2 * a + through, DATA.lower(m, a, b), mixed
            q = [s + WEIGHTS[m] * d for s, d in zip(q, along, strict=True)]
            mine = [v - e * d for v, e, d in zip(mine, eta, along, strict=True)]
    return tuple(v - g * s for v, g, s in zip((x, y, u), gamma, q, strict=True))


@pytest.mark.parametrize("server", [{}, SERVER], ids=["mean", "server"])
def test_f2sa_client_by_client(server):
    eta, tau = (0.05, 0.1, 0.12), 3
    schedule = optax.linear_schedule(0.3, 0.1, 3)
    solver = aipod.FedF2SA(
        upper_lr=eta[0],
        lower_lr=eta[1],
        adjoint_lr=eta[2],
        local_steps=tau,
        perturbation=schedule,
        **server,
    )
    problem = DATA.federation(weights=WEIGHTS)
    state = solver.init(problem, *start())
    x, y = np.full(DX, 0.3), np.full(DY, -0.2)
    u, gamma = y, tuple(server.values()) or eta
    for step in range(4):
        delta = float(schedule(jnp.asarray(step, jnp.int32)))
        x, y, u = f2sa(x, y, u, eta=eta, gamma=gamma, tau=tau, delta=delta)
        state = solver.step(problem, state, key=KEY)
        for found, wanted in ((state.x, x), (state.y, y), (state.adjoint.z, u)):
            same(found, wanted)
    counts = state.counts
    # One x, and y and u, in each outer step.
    assert (int(counts.rounds), int(counts.sent_x), int(counts.sent_y)) == (4, 4, 8)
    samples = int(counts.lower_samples), int(counts.upper_samples)
    assert samples == (4 * 2 * tau * CLIENTS, 4 * 2 * tau * CLIENTS)


def test_f2sa_is_off_by_its_perturbation_and_takes_no_second_derivative():
    problem = DATA.federation()
    off = []
    for delta in (0.1, 0.01):
        solver = aipod.FedF2SA(upper_lr=0.05, local_steps=1, perturbation=delta)
        found = aipod.solve(problem, solver, *start(), 1500, key=KEY)
        off.append(float(aipod.stationarity(problem, found.x, found.y)) ** 0.5)
    assert off[1] < 0.15 * off[0] < 0.1

    @jax.custom_jvp
    def first(y):
        return jnp.sum(y**2)

    @first.defjvp
    def _(primals, tangents):
        # Its derivative cannot be differentiated again.
        slope = jax.lax.stop_gradient(2 * primals[0])
        return first(*primals), jnp.vdot(slope, tangents[0])

    flat = aipod.Bilevel(
        lambda x, y, batch: jnp.sum((y - 1) ** 2) + 0.1 * jnp.sum(x**2),
        lambda x, y, batch: first(y - x),
    )
    # With its second derivative, 0 here, x would go to 0. The paced optimiser sways a little.
    for optimizer, near in ((None, 0.1), (optax.sgd(0.05), 0.002)):
        solver = aipod.FedF2SA(
            lower_lr=0.1, adjoint_lr=0.1, perturbation=0.01, upper_optimizer=optimizer
        )
        x = aipod.solve(flat, solver, jnp.zeros(2), jnp.zeros(2), 600, key=KEY).x
        np.testing.assert_allclose(x, 1 / 1.1, rtol=0, atol=near)


@pytest.mark.parametrize("arguments", [{}, {"upper_optimizer": optax.adam(0.02)}])
def test_simfbo_with_steps_of_ours(arguments):
    """One local step has no drift: curvature's steps and an optimiser reach the solution."""
    problem = DATA.federation(weights=WEIGHTS)
    solver = aipod.SimFBO(local_steps=1, **arguments)
    found = aipod.solve(problem, solver, *start(), 800, key=KEY)
    assert float(aipod.stationarity(problem, found.x, found.y)) < 1e-6
    # The paced optimiser looks at one more batch of each, for what its last move promised.
    more = not arguments
    assert found.ledger.upper_samples == 800 * (2 + more) * CLIENTS
    # And the curvature at one in each step, at a few more in the first.
    assert 0 <= found.ledger.lower_samples // CLIENTS - 800 * (4 + more) < 10


def test_simfbo_by_cohorts():
    """All clients have the same x, y and z, also those who were absent."""
    problem = DATA.federation(participation=0.67)
    solver = aipod.SimFBO(upper_lr=0.02, lower_lr=0.1, adjoint_lr=0.1, local_steps=2)
    found = aipod.solve(problem, solver, *start(), 30, key=KEY)
    for leaf in jax.tree.leaves((found.x, found.y, found.state.adjoint)):
        np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * CLIENTS))
    whole = aipod.solve(DATA.federation(), solver, *start(), 30, key=KEY)
    assert 0.01 < float(jnp.max(jnp.abs(found.x - whole.x))) < 1.0
    assert found.ledger.rounds == 30
    assert found.ledger.lower_samples == 30 * 6 * 2


def fedmbo(x, y, key, *, alpha, beta, eta, steps, terms, random):
    """One outer step of the docstring; permutations and each N' are drawn with the slot's key."""
    clients = range(CLIENTS)
    for _ in range(steps):
        y = y - beta * np.mean([DATA.lower(m, x, y) for m in clients], axis=0)
    v = [y - DATA.wish[m] for m in clients]
    total, each = v, np.full(CLIENTS, terms - 1)
    if random:
        each = np.asarray(jax.random.randint(subkey(key, 0), (CLIENTS,), 0, terms))
    factors = max(each)
    for n in range(1, factors + 1):
        order = np.asarray(jax.random.permutation(round_key(key, n), CLIENTS))
        each = each[order]
        v = [v[order[m]] - (n <= each[m]) * eta * DATA.G[m] @ v[order[m]] for m in clients]
        total = [total[order[m]] + v[m] for m in clients]
    z = [eta * terms * a for a in v] if random else [eta * a for a in total]
    order = np.asarray(jax.random.permutation(round_key(key, terms), CLIENTS))
    h = np.mean([DATA.upper(m, x, z[order[m]]) for m in clients], axis=0)
    return x - alpha * h, y, factors


@pytest.mark.parametrize("random", [False, True], ids=["sum", "random"])
def test_fedmbo_client_by_client(random):
    rates = {"alpha": 0.05, "beta": 0.1, "eta": 0.12}
    solver = aipod.FedMBO(
        upper_lr=0.05,
        lower_lr=0.1,
        adjoint_lr=0.12,
        lower_steps=2,
        adjoint_steps=4,
        adjoint_random=random,
    )
    problem = DATA.federation()
    state = solver.init(problem, *start())
    x, y = np.full(DX, 0.3), np.full(DY, -0.2)
    rounds = sent = samples = 0
    for step in range(5):
        key = keys_of(KEY, jnp.asarray(step))[1]
        x, y, factors = fedmbo(x, y, key, **rates, steps=2, terms=4, random=random)
        state = solver.step(problem, state, key=KEY)
        same(state.x, x)
        same(state.y, y)
        # Two averages of y, a handover before each factor and one after, an average of x.
        rounds += 2 + factors + 1 + 1
        sent += 2 + (factors + 1 if random else 1 + 2 + 2 + 1)
        samples += CLIENTS * (2 + factors + 1)
    counts = state.counts
    assert (int(counts.rounds), int(counts.sent_y), int(counts.sent_x)) == (rounds, sent, 5)
    assert (int(counts.lower_samples), int(counts.upper_samples)) == (samples, 5 * CLIENTS)


@pytest.mark.parametrize("random", [False, True], ids=["sum", "random"])
def test_fedmbo_has_the_mean_of_a_series_with_the_average_hessian(random):
    """Over permutations; the series of each client with its own Hessian alone is far from it."""
    solver = aipod.FedMBO(
        upper_lr=1.0,
        lower_lr=0.1,
        adjoint_lr=0.12,
        lower_steps=1,
        adjoint_steps=3,
        adjoint_random=random,
    )
    problem = DATA.federation()
    state = solver.init(problem, *start())
    x, y = np.full(DX, 0.3), np.full(DY, -0.2)
    y = y - 0.1 * np.mean([DATA.lower(m, x, y) for m in range(CLIENTS)], axis=0)

    def moved(hessians):
        z = []
        for m, hessian in enumerate(hessians):
            v = y - (DATA.wish[m] if hessian is DATA.G[m] else DATA.wish.mean(0))
            shrink = np.eye(DY) - 0.12 * hessian
            z.append(0.12 * (v + shrink @ v + shrink @ shrink @ v))
        return -np.mean([DATA.upper(m, x, z[m]) for m in range(CLIENTS)], axis=0)

    keys = jax.random.split(KEY, 4000)
    step = jax.jit(jax.vmap(lambda key: solver.traced_step(problem, state, key).x[0]))
    found = np.asarray(step(keys)) - x
    error = np.std(found, axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(np.mean(found, axis=0) - moved([DATA.G.mean(0)] * CLIENTS)) < 4 * error)
    alone = np.abs(np.mean(found, axis=0) - moved(list(DATA.G)))
    assert np.max(alone / error) > 8


def test_fedmbo_with_some_of_the_clients():
    solver = aipod.FedMBO(upper_lr=0.02, lower_lr=0.1, adjoint_lr=0.1, adjoint_steps=3)
    whole, some = (
        aipod.solve(DATA.federation(participation=share), solver, *start(), 20, key=KEY)
        for share in (1.0, 0.67)
    )
    np.testing.assert_array_equal(some.x, np.stack([some.x[0]] * CLIENTS))
    assert some.ledger.rounds == whole.ledger.rounds == 20 * (5 + 3 + 1)
    # y 5 times, the series 1 + 2 + 1 vectors, and x.
    assert whole.ledger.bytes_up == 20 * 8 * (DX + (5 + 4) * DY)
    assert 0.6 < some.ledger.bytes_up / whole.ledger.bytes_up < 0.7


def test_what_the_rivals_refuse():
    def square(x, y, batch):
        return jnp.sum((x - y) ** 2)

    x = jnp.zeros((3, 2))
    for solver in (aipod.SimFBO(), aipod.FedMBO(), aipod.FedF2SA()):
        for sets in ((aipod.Budget(1.0),), (aipod.Free(), aipod.Budget(1.0))):
            with pytest.raises(ValueError, match="no constraint but the agreement of clients"):
                solver.init(aipod.Bilevel(square, square, *sets), x, x)
        gossip = aipod.Gossip("ring", 3)
        with pytest.raises(ValueError, match="but upper_set is Gossip"):
            solver.init(aipod.Bilevel(square, square, gossip, gossip), x, x)
    with pytest.raises(ValueError, match="either upper_server_lr or upper_optimizer"):
        aipod.SimFBO(upper_server_lr=0.1, upper_optimizer=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"local_steps .* at least 1"):
        aipod.SimFBO(local_steps=0)
    with pytest.raises(ValueError, match=r"radius .* positive"):
        aipod.SimFBO(radius=0.0)
    with pytest.raises(ValueError, match="Consensus with weights cannot hand"):
        aipod.FedMBO().init(DATA.federation(weights=WEIGHTS), *start())
