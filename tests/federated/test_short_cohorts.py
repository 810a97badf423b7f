"""Short messages where only some of the clients take part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated
from tests.federated.test_participation import CLIENTS, N, quadratic_clients

STEPS = {"upper_lr": 0.1, "lower_lr": 0.3, "adjoint_lr": 0.3}
KINDS = ["bfloat16", "float16", "float8", "float4"]
START = federated.replicate(jnp.zeros(N), CLIENTS)


def solved(problem, kind, steps, start=START, **options):
    solver = aipod.E3AiPOD(**STEPS | options, compression=kind)
    return aipod.solve(problem, solver, start, start, steps, key=jax.random.key(1))


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_points_stay_exact(kind):
    problem, solution = quadratic_clients(0.6)
    found = solved(problem, kind, 1000)
    np.testing.assert_allclose(found.x[0], solution, atol=1e-12)
    for correction in (found.state.lower.correction, found.state.adjoint.correction):
        np.testing.assert_allclose(np.sum(correction, axis=0), 0, atol=1e-12)


def test_without_a_memory_nothing_is_kept_of_absent_clients():
    """Then x settles about where it settles without rounding: at the noise of who is there."""
    problem, solution = quadratic_clients(0.6)
    short, whole = (solved(problem, kind, 1000, memory=False) for kind in ("float8", None))
    state = short.state
    assert state.upper.known is state.lower.known is state.adjoint.known is None
    off, rounding = np.linalg.norm(short.x[0] - solution), np.linalg.norm(short.x[0] - whole.x[0])
    assert off > 1e-3
    assert rounding < 0.1 * off


@pytest.mark.parametrize(("kind", "size"), [("float8", 3 * (N + 4)), ("float16", 3 * (2 * N + 4))])
def test_members_send_little_and_hear_all_of_x(kind, size):
    """x, y and u; who was absent has not heard what a difference of x would be added to."""
    ledger = solved(quadratic_clients(0.6)[0], kind, 10).ledger
    assert ledger.bytes_up == 10 * 3 * round(0.6 * size / 3)
    assert ledger.bytes_down == 10 * 3 * round(0.6 * 8 * N)
    everyone = solved(quadratic_clients(1.0)[0], kind, 10)
    assert (everyone.state.upper.heard is not None) == (kind == "float8")
    assert solved(quadratic_clients(0.6)[0], kind, 1).state.upper.heard is None


def rounded(difference, kind):
    """As sent: each client's numbers as shares of the largest of them, of 16 or 8 bits."""
    scale = np.max(np.abs(difference), axis=1, keepdims=True)
    scale = scale.astype(np.float32).astype(float)
    share = difference / np.where(scale > 0, scale, 1)
    if kind == "float16":
        return share.astype(np.float16) * scale
    share = np.clip(share, -1, 1) * 448
    # A sign, 4 bits of exponent from 2^-6 on, 3 of mantissa.
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(share), 1e-300))), -6) - 3)
    return np.round(share / unit) * unit * scale / 448


@pytest.mark.parametrize("kind", ["float16", "float8"])
def test_the_equations_in_numpy(kind):
    """Who takes part sends where its local steps led it, and how its direction differs from before.

    y_hat and u_hat are rounded as differences to the y and u that all have, the direction of x as
    one to what the server knows of the client.
    """
    problem, _ = quadratic_clients(0.6)
    (Q, t), (_, C) = (
        [np.asarray(part)[:, 0] for part in samples.expected().data]
        for samples in (problem.upper_samples, problem.lower_samples)
    )
    S, A, step = 4, 3, 0.1
    plain = optax.sgd(1.0)
    solver = aipod.E3AiPOD(
        **STEPS,
        lower_steps=S,
        adjoint_steps=A,
        compression=kind,
        damping=0.0,
        lower_optimizer=plain,
        adjoint_optimizer=plain,
    )
    x, y, u = np.array([0.5, -1.0, 2.0]), np.array([1.0, 0.3, -0.2]), np.zeros(N)
    state = solver.init(problem, *(federated.replicate(jnp.asarray(v), CLIENTS) for v in (x, y)))
    r, e, known = (np.zeros((CLIENTS, N)) for _ in range(3))
    average, seen = np.zeros(N), set()
    beta = rho = 0.3
    for k in range(12):
        before = np.asarray(state.lower.correction)
        state = solver.step(problem, state, key=jax.random.key(k))
        here = np.flatnonzero(np.any(np.asarray(state.lower.correction) != before, axis=1))
        assert len(here) == 3
        seen |= set(here.tolist())
        told = []
        for m in here:
            near, along = y.copy(), u.copy()
            for _ in range(S):
                near = near - beta * (Q[m] @ near - C[m] @ x - r[m])
            for _ in range(A):
                along = along - rho * (near - t[m] + Q[m] @ along - e[m])
            told.append((near, along, 0.5 * x - C[m].T @ along))
        hats, alongs, slopes = (np.stack(part) for part in zip(*told, strict=True))
        hats, alongs = y + rounded(hats - y, kind), u + rounded(alongs - u, kind)
        y, u = hats.mean(0), alongs.mean(0)
        r[here] += (y - hats) / (beta * S)
        e[here] += (u - alongs) / (rho * A)
        news = rounded(slopes - known[here], kind)
        known[here] += news
        change = np.mean(news, axis=0)
        x = x - step * (average + change)
        average = average + 0.6 * change
        wanted = {
            "x": (state.x, np.tile(x, (CLIENTS, 1))),
            "y": (state.y, np.tile(y, (CLIENTS, 1))),
            "r": (state.lower.correction, r),
            "e": (state.adjoint.correction, e),
            "known": (state.upper.known, known),
            "average": (state.upper.average[0], average),
        }
        for name, pair in wanted.items():
            np.testing.assert_allclose(*pair, atol=1e-12, err_msg=f"{name} after step {k}")
    assert seen == set(range(CLIENTS))


def test_with_weights_and_its_own_pace():
    """The defaults, clients of unlike weight and 8 bits: the solution of all of them."""
    rng = np.random.default_rng(4)
    clients, weights = 12, rng.uniform(0.5, 3.0, 12)
    centres = rng.normal(size=(clients, 1, 4))
    bends = rng.uniform(0.5, 2.0, size=(clients, 1, 4))
    problem = federated.federate(
        lambda x, y, batch: 0.5 * jnp.sum((y - 1) ** 2) + 0.05 * jnp.sum(x**2),
        lambda x, y, batch: 0.5 * jnp.sum(batch[1][0] * (y - x - batch[0][0]) ** 2),
        (centres, bends),
        (centres, bends),
        batch_size=None,
        participation=0.25,
        weights=weights,
    )
    shares = (weights / weights.sum())[:, None] * bends[:, 0]
    offset = (shares * centres[:, 0]).sum(0) / shares.sum(0)
    start = federated.replicate(jnp.zeros(4), clients)
    found = aipod.solve(
        problem, aipod.E3AiPOD(compression="float8"), start, start, 1500, key=jax.random.key(2)
    )
    np.testing.assert_allclose(found.x[0], (1 - offset) / 1.1, atol=1e-3)
    np.testing.assert_allclose(weights @ np.asarray(found.state.lower.correction), 0, atol=1e-10)


def test_a_run_resumes_bit_for_bit(tmp_path, optimised):
    problem, _ = quadratic_clients(0.6)
    arguments = (problem, aipod.E3AiPOD(compression="float8"), START, START)
    whole = aipod.solve(*arguments, 40, key=jax.random.key(5))
    where = {"key": jax.random.key(5), "checkpoint": tmp_path / "state"}
    aipod.solve(*arguments, 20, **where)
    found = aipod.solve(*arguments, 40, resume=True, **where)
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("what", ["no server", "own data"])
def test_elsewhere_there_are_no_short_messages(what):
    if what == "no server":
        gossip = aipod.Gossip("ring", CLIENTS)
        problem = dataclasses.replace(quadratic_clients(1.0)[0], upper_set=gossip, lower_set=gossip)
    else:
        # Batches of unknown clients: no cohort can be taken of them.
        problem, _ = quadratic_clients(0.6)
        whole = problem.lower_samples.expected()
        problem = dataclasses.replace(problem, lower_samples=lambda key: whole)
    with pytest.raises(ValueError, match="compression is for federations with a server"):
        solved(problem, "float8", 1)
