"""What partial participation costs: noise from who happens to be there, and no bias."""

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod import federated

CLIENTS, N = 5, 3


def quadratic_clients(participation):
    """Unlike quadratic clients without any other noise, and the solution in closed form.

    g_m = 1/2 y' Q_m y - y' C_m x,   f_m = 1/2 ||y - t_m||^2 + 1/4 ||x||^2
    """
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.normal(size=(N, N)))[0] for _ in range(CLIENTS)]
    Q = np.stack([basis @ np.diag(np.linspace(0.5, 2, N)) @ basis.T for basis in bases])
    C, t = rng.normal(size=(CLIENTS, N, N)), rng.normal(size=(CLIENTS, N))

    def upper(x, y, batch):
        return 0.5 * jnp.sum((y - batch[1][0]) ** 2) + 0.25 * jnp.sum(x**2)

    def lower(x, y, batch):
        return 0.5 * y @ batch[0][0] @ y - y @ (batch[1][0] @ x)

    problem = federated.federate(
        upper,
        lower,
        (Q[:, None], t[:, None]),
        (Q[:, None], C[:, None]),
        batch_size=None,
        participation=participation,
    )
    slope = np.linalg.solve(Q.mean(0), C.mean(0))
    solution = np.linalg.solve(slope.T @ slope + 0.5 * np.eye(N), slope.T @ t.mean(0))
    return problem, solution


def tail(participation, alpha):
    """x in the second half of a run of 200 / alpha outer steps of E-AiPOD, less the solution."""
    problem, solution = quadratic_clients(participation)
    start = federated.replicate(jnp.zeros(N), CLIENTS)
    steps = int(200 / alpha)
    solver = aipod.EAiPOD(upper_lr=alpha, adjoint_steps=60)
    run = aipod.solve(
        problem,
        solver,
        start,
        start,
        steps,
        key=jax.random.key(1),
        record=lambda x, y: {"x": x[0]},
        every=1,
    )
    return run.history["x"][steps // 2 :] - solution


def test_e_aipod_with_absent_clients_stays_away_by_the_noise_of_who_is_there():
    """It must: at the solution the clients' hypergradients are not zero, only their sum is.

    A round with some of them averages a sample of that sum, so x moves as SGD does: at a distance
    proportional to sqrt(alpha), around a mean that is much nearer. A quarter of alpha so halves
    the distance; runs of 200 / alpha steps know the mean to about a seventh of it.
    """
    np.testing.assert_allclose(tail(1.0, 0.1), 0, atol=1e-10)
    long, short = tail(0.6, 0.1), tail(0.6, 0.025)
    rms = [float(np.sqrt(np.mean(np.sum(error**2, axis=1)))) for error in (long, short)]
    assert 1.6 < rms[0] / rms[1] < 2.9
    means = [float(np.linalg.norm(error.mean(axis=0))) for error in (long, short)]
    assert means[0] < 0.5 * rms[0]
    assert means[1] < 0.5 * rms[1]
