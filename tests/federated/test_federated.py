"""A federation is the same problem with consensus sets, shown against matrices and plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod._misc.keys import coins, subkeys
from aipod.slots import Turn

KEY = jax.random.key(5)


def ridge_lower(x, y, batch):
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ y - targets) ** 2) + 0.5 * jnp.sum((y - x) ** 2)


def ridge_upper(x, y, batch):
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ y - targets) ** 2) + 0.05 * jnp.sum(x**2)


def client_data(clients, size, *, dim=3, seed=0):
    """Regression data that differs between clients; `size` may be a function of the client."""
    rng = np.random.default_rng(seed)
    data = []
    for m in range(clients):
        n = size(m) if callable(size) else size
        inputs = rng.normal(size=(n, dim)) * (0.5 + m / clients)
        data.append((inputs, inputs @ rng.normal(size=dim) + 0.1 * m))
    return data


def ridge(clients=4, size=5, **options):
    data = client_data(clients, size)
    options = {"batch_size": None} | options
    problem = federated.federate(ridge_upper, ridge_lower, data, data, **options)
    x, y = (federated.replicate(jnp.full(3, v), clients) for v in (0.3, -0.2))
    return problem, x, y


def consensus_matrix(clients, dim):
    """The paper's A of `A-V2`."""
    difference = np.eye(clients - 1, clients) - np.eye(clients - 1, clients, k=1)
    return np.kron(difference, np.eye(dim))


@pytest.mark.parametrize(
    "solver",
    [
        aipod.EAiPOD(
            upper_lr=0.05,
            lower_lr=0.1,
            lower_prob=0.4,
            upper_steps=2,
            adjoint_lr=0.1,
            adjoint_steps=10,
        ),
        aipod.E2AiPOD(upper_lr=0.05, lower_lr=0.1, lower_prob=0.4, adjoint_lr=0.1, upper_steps=2),
    ],
    ids=["E-AiPOD", "E2-AiPOD"],
)
def test_consensus_is_the_explicit_matrix(solver):
    problem, x, y = ridge(batch_size=2)
    explicit = aipod.Affine(consensus_matrix(4, 3))
    by_matrix = dataclasses.replace(problem, upper_set=explicit, lower_set=explicit)
    a = aipod.solve(problem, solver, x, y, 30, key=KEY)
    b = aipod.solve(by_matrix, solver, x, y, 30, key=KEY)
    np.testing.assert_allclose(a.x, b.x, atol=1e-10)
    np.testing.assert_allclose(a.y, b.y, atol=1e-10)
    assert a.ledger.rounds == a.ledger.projections
    assert "rounds" not in b.history


def test_e_aipod_is_the_papers_federated_algorithm_client_by_client():
    """`stoc-alg-fed` as corrected, in NumPy loops over clients, with the same coins."""
    clients, beta, alpha, eta, p, S, N = 4, 0.1, 0.05, 0.1, 0.4, 6, 5
    data = client_data(clients, 5)
    problem, x0, y0 = ridge(clients, 5)
    solver = aipod.EAiPOD(
        upper_lr=alpha,
        lower_lr=beta,
        lower_prob=p,
        lower_steps=S,
        upper_steps=2,
        adjoint_lr=eta,
        adjoint_steps=N,
    )
    state = solver.init(problem, x0, y0)
    x, y = np.array(x0), np.array(y0)
    r = np.zeros_like(y)
    hessians = [a.T @ a / len(a) + np.eye(3) for a, _ in data]
    slopes = [a.T @ b / len(a) for a, b in data]
    for k in range(3):
        keys = subkeys(jax.random.fold_in(KEY, k), 6)
        for coin in np.asarray(coins(subkeys(keys[0], S + 1)[0], p, S)):
            hat = np.stack(
                [
                    y[m] - beta * (hessians[m] @ y[m] - slopes[m] - x[m] - r[m])
                    for m in range(clients)
                ]
            )
            if coin:
                mean = np.mean(hat - beta / p * r, axis=0)
                y = np.stack([mean] * clients)
                r = r + p / beta * (y - hat)
            else:
                y = hat
        upper = [a.T @ (a @ y[m] - b) / len(a) for m, (a, b) in enumerate(data)]
        v = np.mean(upper, axis=0)
        z = eta * v
        for _ in range(1, N):
            v = np.mean([v - eta * hessians[m] @ v for m in range(clients)], axis=0)
            z = z + eta * v
        w = z  # grad_xy g_m = -I
        moved = x
        for _ in range(2):
            moved = moved - alpha * (0.1 * moved + w)
        x = np.stack([moved.mean(axis=0)] * clients)
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.x, x, atol=1e-12)


def test_heterogeneous_clients_reach_the_exact_solution_and_local_sgd_does_not():
    clients = 20
    data = client_data(clients, 6)
    problem, x, y = ridge(clients, 6)
    solver = aipod.EAiPOD(upper_lr=0.2, lower_prob=0.2, lower_steps=10, adjoint_steps=60)
    solution = aipod.solve(problem, solver, x, y, 1500, key=KEY, every=1500)
    G = np.mean([a.T @ a / len(a) for a, _ in data], axis=0)
    s = np.mean([a.T @ b / len(a) for a, b in data], axis=0)
    jacobian = np.linalg.inv(G + np.eye(3))
    # F(x) = 1/2 y'Gy - s'y + 0.05 |x|^2 with y = jacobian (s + x)
    best = np.linalg.solve(
        jacobian @ G @ jacobian + 0.1 * np.eye(3), jacobian @ (s - G @ jacobian @ s)
    )
    np.testing.assert_allclose(solution.x, np.stack([best] * clients), atol=1e-8)
    y_best = jacobian @ (s + best)
    np.testing.assert_allclose(solution.y, np.stack([y_best] * clients), atol=1e-8)

    class LocalSGD(aipod.ProxSkip):
        """Averages now and then, and forgets the correction in between."""

        def run(self, turn, state):
            y, _, cost = super().run(turn, state)
            return y, state, cost

    local = aipod.Alternating(LocalSGD(steps=10, prob=0.2), solver.adjoint, aipod.EveryStep(lr=0.2))
    stalled = aipod.solve(problem, local, x, y, 1500, key=KEY, every=1500)
    assert float(jnp.max(jnp.abs(federated.average(stalled.y) - y_best))) > 1e-3


def test_unequal_clients_are_the_plain_definition():
    """One example up to seven; the padding must count for nothing."""
    size = [1, 7, 3, 2]
    data = client_data(4, lambda m: size[m])
    problem, x, y = ridge(4, lambda m: size[m])
    for scale in (1.0, 2.0):
        expected = sum(
            ridge_lower(scale * x[m], y[m], (jnp.asarray(a), jnp.asarray(b)))
            for m, (a, b) in enumerate(data)
        )
        batch = problem.lower_samples.expected()
        np.testing.assert_allclose(problem.lower(scale * x, y, batch), expected, rtol=1e-12)
    # Minibatches draw only what a client has.
    sampler = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=50).lower_samples
    drawn = sampler(KEY).data[0]
    for m, (inputs, _) in enumerate(data):
        rows = {tuple(row) for row in np.asarray(drawn[m])}
        assert rows == {tuple(row) for row in inputs}
    solver = aipod.EAiPOD(upper_lr=0.1, lower_prob=0.3)
    solution = aipod.solve(problem, solver, x, y, 50, key=KEY)
    assert bool(jnp.all(jnp.isfinite(solution.y)))


def test_weights_are_those_of_the_objective():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    data = client_data(4, 5)
    problem, x, y = ridge(4, 5, weights=weights)
    y_star = aipod.exact_lower(problem, x, y)
    shares = weights / weights.sum()
    G = sum(w * (a.T @ a / len(a)) for w, (a, _) in zip(shares, data, strict=True))
    s = sum(w * (a.T @ b / len(a)) for w, (a, b) in zip(shares, data, strict=True))
    expected = np.linalg.solve(G + np.eye(3), s + np.asarray(x[0]))
    np.testing.assert_allclose(y_star, np.stack([expected] * 4), atol=1e-9)
    lower = aipod.ProxSkip(steps=4000, prob=0.3, lr=0.1)
    rates = aipod.stepsize.Rates(jnp.zeros((), int), None)
    found, _, _ = lower.run(Turn(problem, x, y, rates, KEY), lower.init(problem, x, y))
    np.testing.assert_allclose(found, y_star, atol=1e-8)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 2.0, 3.0, 4.0, 5.0])])
def test_partial_participation_is_unbiased_and_keeps_solutions(weights):
    consensus = aipod.Consensus(weights, participation=0.4)
    values = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2)))
    draws = 20_000
    keys = jax.random.split(KEY, draws)
    means = jax.vmap(lambda key: consensus.for_round(key).tangent(values)[0])(keys)
    error = jnp.mean(means, axis=0) - aipod.Consensus(weights).project(values)[0]
    assert np.all(np.abs(error) < 4 * np.std(means, axis=0) / np.sqrt(draws))
    same = federated.replicate(jnp.array([1.0, 2.0]), 5)
    np.testing.assert_allclose(consensus.for_round(KEY).project(same), same, rtol=1e-14)
    # Corrections: absent clients keep theirs, and the weighted sum stays zero.
    chosen = consensus.for_round(KEY)
    ahead = values
    new = chosen.project_corrected(ahead, 0 * ahead)
    change = chosen.keep_absent(new - ahead, 0 * ahead)
    assert int(jnp.sum(jnp.any(change != 0, axis=1))) == 2
    shares = np.ones(5) if weights is None else weights
    np.testing.assert_allclose(shares @ np.asarray(change), 0, atol=1e-12)


def test_proxskip_with_absent_clients_still_solves_the_lower_level():
    problem, x, y = ridge(8, 5, participation=0.25)
    lower = aipod.ProxSkip(steps=6000, prob=0.3, lr=0.1)
    rates = aipod.stepsize.Rates(jnp.zeros((), int), None)
    found, _, cost = lower.run(Turn(problem, x, y, rates, KEY), lower.init(problem, x, y))
    np.testing.assert_allclose(found, aipod.exact_lower(problem, x, y), atol=1e-7)
    assert int(cost.rounds) == int(cost.projections) == int(cost.sent_y)


def test_rounds_and_bytes_are_counted_from_the_real_sizes():
    problem, x, y = ridge(4, 5)
    solver = aipod.AiPOD(upper_lr=0.1, lower_steps=3, adjoint_steps=2)
    ledger = aipod.solve(problem, solver, x, y, 10, key=KEY).ledger
    # 3 averages of y, 2 in the series and 1 of x, each of 3 float64 numbers
    assert ledger.rounds == 10 * 6
    assert ledger.bytes_up == ledger.bytes_down == 10 * 6 * 3 * 8
    some, _, _ = ridge(4, 5, participation=0.5)
    assert aipod.solve(some, solver, x, y, 10, key=KEY).ledger.bytes_up == ledger.bytes_up // 2


def test_composite_losses_agree_with_plain_ones():
    data = client_data(3, 6)

    def features(x, batch):
        return jnp.tanh(batch[0] * x[None, :])

    def head(z, y, batch):
        return 0.5 * jnp.mean((z @ y - batch[1]) ** 2) + 0.5 * jnp.sum(y**2)

    def plain(x, y, batch):
        return head(features(x, batch), y, batch)

    start = [federated.replicate(jnp.full(3, v), 3) for v in (0.3, -0.2)]
    solver = aipod.EAiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
    for size in (2, None):
        runs = [
            aipod.solve(
                federated.federate(plain, lower, data, data, batch_size=size),
                solver,
                *start,
                20,
                key=KEY,
            )
            for lower in (plain, aipod.Composite(features, head))
        ]
        np.testing.assert_allclose(runs[0].y, runs[1].y, atol=1e-12)
        np.testing.assert_allclose(runs[0].x, runs[1].x, atol=1e-12)


LABELS = np.repeat(np.arange(10), 30)


@pytest.mark.parametrize(
    "scheme", [federated.IID(), federated.Shards(2), federated.Dirichlet(0.1)], ids=repr
)
def test_partitions_deal_every_example_once(scheme):
    parts = federated.partition(LABELS, 20, scheme, key=KEY)
    assert len(parts) == 20
    assert min(len(part) for part in parts) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    again = federated.partition(LABELS, 20, scheme, key=KEY)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    classes = np.mean([len(np.unique(LABELS[part])) for part in parts])
    low, high = {"IID": (6, 10), "Shards": (1, 3), "Dirichlet": (1, 5)}[type(scheme).__name__]
    assert low <= classes <= high


def test_splits_cover_each_client():
    parts = federated.partition(LABELS, 40, federated.Dirichlet(0.05), key=KEY)
    train, validation = federated.split(parts, 0.8, key=KEY)
    for part, first, second in zip(parts, train, validation, strict=True):
        assert len(first) >= 1
        assert len(second) >= 1
        assert set(first) | set(second) == set(part)
        if len(part) > 1:
            assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: federated.partition(LABELS, 0, key=KEY), "clients must be at least 1"),
        (lambda: federated.partition(LABELS, 200, federated.Shards(2), key=KEY), "too few"),
        (lambda: federated.partition(LABELS[:, None], 2, key=KEY), "labels must be a vector"),
        (lambda: federated.Shards(0), "per_client must be"),
        (lambda: federated.Dirichlet(0.0), "alpha must be positive"),
        (lambda: federated.split([], 1.0, key=KEY), "share must lie"),
        (lambda: aipod.Consensus(participation=0.0), "participation must be a share"),
        (lambda: ridge(3, 5, weights=np.ones(2)), "one number for each client, 3 of them, got 2"),
        (lambda: ridge(3, 5, batch_size=0), "batch_size must be a whole number"),
        (lambda: ridge(3, lambda m: m), r"clients \[0\] have no example"),
        (
            lambda: federated.federate(
                ridge_upper, ridge_lower, client_data(2, 3), client_data(3, 3), batch_size=1
            ),
            "upper_data has 2 clients, but lower_data has 3",
        ),
        (lambda: aipod.ClientMinibatches(np.ones(3), 1), r"axes \(client, example"),
        (
            lambda: aipod.ClientMinibatches(np.ones((2, 3)), 1, counts=np.array([0, 3])),
            "counts must give each of the 2 clients",
        ),
    ],
)
def test_bad_federations_get_one_clear_sentence(act, message):
    with pytest.raises(ValueError, match=message):
        act()


class Loops:
    """FedNest and LFedNest on the ridge federation, in NumPy loops over clients, without noise."""

    def __init__(self, clients):
        data = client_data(clients, 5)
        self.clients = range(clients)
        self.hessian = [a.T @ a / len(a) for a, _ in data]
        self.target = [a.T @ b / len(a) for a, b in data]

    def g_y(self, m, x, y):
        return self.hessian[m] @ y - self.target[m] + y - x

    def f_y(self, m, y):
        return self.hessian[m] @ y - self.target[m]

    def neumann(self, start, m, eta, terms):
        """eta sum_n (I - eta H)^n start, H that of client m, or the mean where m is None."""
        mean = np.mean(self.hessian, axis=0) if m is None else self.hessian[m]
        v, total = start, start
        for _ in range(1, terms):
            v = v - eta * (mean @ v + v)
            total = total + v
        return eta * total

    def step(self, x, y, *, light, alpha, beta, eta, tau, episodes, terms):
        for _ in range(episodes):
            q = np.mean([self.g_y(m, x[m], y[m]) for m in self.clients], axis=0)
            ends = []
            for m in self.clients:
                v = y[m]
                for _ in range(tau):
                    g = self.g_y(m, x[m], v)
                    v = v - beta * (g if light else g - self.g_y(m, x[m], y[m]) + q)
                ends.append(v)
            y = np.stack([np.mean(ends, axis=0)] * len(self.clients))
        slopes = [self.f_y(m, y[m]) for m in self.clients]
        if light:
            z = [self.neumann(slopes[m], m, eta, terms) for m in self.clients]
        else:
            z = [self.neumann(np.mean(slopes, axis=0), None, eta, terms)] * len(self.clients)
        here = [0.1 * x[m] + z[m] for m in self.clients]
        mean = np.mean(here, axis=0)
        ends = []
        for m in self.clients:
            v = x[m]
            for _ in range(2):
                h = 0.1 * v + z[m]
                v = v - alpha * (h if light else h - here[m] + mean)
            ends.append(v)
        return np.stack([np.mean(ends, axis=0)] * len(self.clients)), y


@pytest.mark.parametrize("light", [False, True], ids=["FedNest", "LFedNest"])
def test_fednest_client_by_client(light):
    problem, x0, y0 = ridge(4, 5)
    make = aipod.LFedNest if light else aipod.FedNest
    solver = make(
        upper_lr=0.05,
        lower_lr=0.1,
        lower_steps=3,
        lower_episodes=2,
        upper_steps=2,
        adjoint_steps=4,
        adjoint_lr=0.1,
    )
    state, (x, y) = solver.init(problem, x0, y0), (np.array(x0), np.array(y0))
    for _ in range(3):
        x, y = Loops(4).step(
            x, y, light=light, alpha=0.05, beta=0.1, eta=0.1, tau=3, episodes=2, terms=4
        )
        state = solver.step(problem, state, key=KEY)
        np.testing.assert_allclose(state.y, y, atol=1e-12)
        np.testing.assert_allclose(state.x, x, atol=1e-12)
    # FedNest: 2 x 2 for y, 4 in the series, 2 for x. LFedNest: 2 for y, 1 for x.
    assert int(state.counts.rounds) == 3 * (3 if light else 10)


def test_fedavg_ignores_what_x_does_to_y():
    problem, x, y = ridge(4, 5)
    solution = aipod.solve(problem, aipod.FedAvg(upper_lr=0.5), x, y, 400, key=KEY)
    # grad_x f = 0.1 x alone drives x to zero.
    np.testing.assert_allclose(solution.x, 0, atol=1e-6)
    assert solution.ledger.rounds == 2 * 400
