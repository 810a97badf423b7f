"""What all clients share is kept once, and nothing else changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from aipod import federated

M = 6
KEY = jax.random.key(3)
RNG = np.random.default_rng(0)


def lower(x, y, batch):
    fit = jnp.tanh(batch[0] @ x["w"]) @ y - batch[1]
    return 0.5 * jnp.mean(fit**2) + 0.05 * jnp.sum(y**2)


def upper(x, y, batch):
    return lower(x, y, batch) + 0.01 * jnp.sum(x["w"] ** 2)


def rows(count):
    return RNG.normal(size=(count, 3)), RNG.normal(size=count)


def stacked():
    return RNG.normal(size=(M, 7, 3)), RNG.normal(size=(M, 7))


EQUAL = (stacked(), stacked())
UNEQUAL = ([rows(c) for c in (3, 5, 7, 4, 2, 6)], [rows(c) for c in (4, 2, 6, 3, 7, 5)])
WEIGHTS = [1.0, 2.0, 0.5, 1.5, 1.0, 3.0]
X0 = {"w": jnp.asarray(RNG.normal(size=(3, 2)))}
Y0 = jnp.asarray(RNG.normal(size=2))


def federation(data=EQUAL, batch_size=4, **options):
    return federated.federate(upper, lower, *data, batch_size=batch_size, **options)


def start(clients=M):
    return federated.replicate(X0, clients), federated.replicate(Y0, clients)


def apart(solver, problem, steps):
    """The method with a copy of everything for each client, as the equations are written."""
    state = eqx.filter_jit(solver.initial)(problem, *start())
    step = eqx.filter_jit(solver._step)
    for _ in range(steps):
        state = step(problem, state, KEY)
    return state


CASES = {
    "aipod": (aipod.AiPOD(), {"weights": WEIGHTS}),
    "e-aipod": (aipod.EAiPOD(), {"data": UNEQUAL, "batch_size": 2}),
    "e-aipod, T = 3": (aipod.EAiPOD(upper_steps=3, upper_lr=0.05), {"weights": WEIGHTS}),
    "e2-aipod, T = 2": (aipod.E2AiPOD(upper_steps=2, upper_lr=0.05), {}),
    "e3-aipod": (aipod.E3AiPOD(), {"data": UNEQUAL, "batch_size": None, "weights": WEIGHTS}),
    "e3-aipod, 16 bits": (aipod.E3AiPOD(compression="bfloat16"), {"weights": WEIGHTS}),
    "e3-aipod, 8 bits": (aipod.E3AiPOD(compression="float8"), {}),
    "fednest": (aipod.FedNest(upper_steps=3), {"weights": WEIGHTS}),
}


@pytest.mark.parametrize("name", CASES)
def test_one_copy_gives_what_one_for_each_client_gives(name):
    solver, options = CASES[name]
    problem = federation(**options)
    found, wanted = solver.init(problem, *start()), apart(solver, problem, 9)
    for _ in range(9):
        found = solver.step(problem, found, key=KEY)
    # The optimiser measures lengths over its copies of x, so that its own numbers are others.
    parts = [(s.x, s.y, s.lower, s.adjoint, s.upper.seen, s.moves) for s in (found, wanted)]
    for a, b in zip(*map(jax.tree.leaves, parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert found.x["w"].shape == (M, 3, 2)


def sizes(solver, **options):
    state, keeping = solver.init_kept(federation(**options), *start())
    return {
        jax.tree_util.keystr(path): leaf.shape[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.ndim
    }, keeping


def test_what_is_kept_once():
    found, _ = sizes(aipod.E3AiPOD())
    own = {name for name, count in found.items() if count == M}
    assert all("correction" in n or "health" in n or "vector" in n or "of_y" in n for n in own), own
    assert found[".x['w']"] == found[".y"] == found[".adjoint.u"] == 1
    assert found[".upper.own.first['w']"] == 1
    # Between two projections clients have their own y; x and its optimiser are common all the same.
    found, _ = sizes(aipod.EAiPOD(upper_steps=3))
    assert found[".y"] == M
    assert found[".x['w']"] == found[".upper.own.first['w']"] == 1
    # E2-AiPOD with T > 1 leaves x apart.
    found, keeping = sizes(aipod.E2AiPOD(upper_steps=2, upper_lr=0.1))
    assert found[".x['w']"] == M
    assert keeping is not None


def test_the_gradient_of_a_common_x_is_one_sum():
    """No array of the compiled step holds a copy of x for each client."""
    clients, width = 50, 37
    data = (np.ones((clients, 4, 3)), np.ones((clients, 4)))
    problem = federated.federate(upper, lower, data, data, batch_size=None)
    x0 = {"w": jnp.ones((1, 3, width))}
    solver = aipod.E3AiPOD(lower_steps=2)
    state, keeping = solver.init_kept(problem, x0, jnp.ones((1, width)))
    step = eqx.filter_jit(lambda p, s: solver.kept_step(keeping, p, s, KEY))
    text = step.lower(problem, state).compile().compiled.as_text()
    assert f"[{clients},3,{width}]" not in text
    assert f"[{clients},{width}]" in text


def test_a_start_may_have_one_row_for_all_clients():
    problem, solver = federation(weights=WEIGHTS), aipod.E3AiPOD()
    long = solver.step(problem, solver.init(problem, *start()), key=KEY)
    short = aipod.solve(problem, solver, *start(1), 1, key=KEY)
    np.testing.assert_allclose(long.x["w"], short.x["w"], rtol=1e-12)
    assert short.y.shape == (M, 2)
    assert short.ledger.rounds == 1
    assert solver.init(problem, *start(1)).x["w"].shape == (M, 3, 2)
    assert "rounds" in str(short)


def test_unlike_starts_of_y_are_averaged():
    problem, solver = federation(weights=WEIGHTS), aipod.E3AiPOD()
    x0, _ = start()
    unlike = jnp.asarray(RNG.normal(size=(M, 2)))
    state = solver.init(problem, x0, unlike)
    weights = np.asarray(WEIGHTS) / np.sum(WEIGHTS)
    np.testing.assert_allclose(state.y, np.tile(weights @ np.asarray(unlike), (M, 1)), rtol=1e-12)
    # Where clients keep their own y, it is as it was.
    np.testing.assert_array_equal(aipod.EAiPOD().init(problem, x0, unlike).y, unlike)


def test_a_cohort_is_a_federation_of_its_members():
    """One step by half of the clients: theirs alone, and the others keep their corrections."""
    solver = aipod.E3AiPOD(lower_lr=0.1, adjoint_lr=0.1, upper_optimizer=optax.sgd(0.1))
    problem = federation(participation=0.5, weights=WEIGHTS, batch_size=None)
    state = solver.init(problem, *start())
    new = solver.step(problem, state, key=KEY)
    here = np.flatnonzero(np.any(np.asarray(new.lower.correction) != 0, axis=1))
    assert len(here) == 3
    some = tuple(jax.tree.map(lambda leaf: leaf[here], one) for one in EQUAL)
    weights = np.asarray(WEIGHTS)[here]
    alone = federated.federate(upper, lower, *some, batch_size=None, weights=weights)
    x0, y0 = start(3)
    wanted = solver.step(alone, solver.init(alone, x0, y0), key=KEY)
    np.testing.assert_allclose(new.y[0], wanted.y[0], rtol=1e-12)
    np.testing.assert_allclose(new.lower.correction[here], wanted.lower.correction, rtol=1e-9)
    # Directions are unbiased for all clients: the cohort's weights are not brought to sum 1.
    share = weights.mean() / np.mean(WEIGHTS)
    moved = [np.asarray(s.x["w"][0] - X0["w"]) for s in (new, wanted)]
    np.testing.assert_allclose(moved[0], share * moved[1], rtol=1e-9)
    np.testing.assert_allclose(
        np.asarray(WEIGHTS) @ np.asarray(new.lower.correction), 0, atol=1e-12
    )


def test_absent_clients_are_not_paid_for():
    solver = aipod.E3AiPOD()

    def samples(problem):
        state = solver.step(problem, solver.init(problem, *start()), key=KEY)
        return int(state.counts.lower_samples)

    assert 2 * samples(federation(participation=0.5)) == samples(federation())


def test_a_cohort_for_all_rounds_of_a_step():
    solver = aipod.EAiPOD(lower_prob=0.1)
    problem = federation(participation=0.5, chosen="step")
    solution = aipod.solve(problem, solver, *start(), 12, key=KEY)
    # The last local step always projects, so that who comes next can go on.
    assert np.ptp(np.asarray(solution.y), axis=0).max() == 0
    np.testing.assert_allclose(np.sum(solution.state.lower.correction, axis=0), 0, atol=1e-12)
    with pytest.raises(ValueError, match="chosen='step'"):
        aipod.solve(problem, aipod.E2AiPOD(upper_steps=2, upper_lr=0.1), *start(), 2, key=KEY)
    with pytest.raises(ValueError, match="chosen must be 'round' or 'step'"):
        federation(participation=0.5, chosen="day")


def test_a_list_of_clients_may_hold_arrays_of_jax():
    data = [jax.tree.map(jnp.asarray, clients) for clients in UNEQUAL]
    found = federation(data, batch_size=None).lower_samples.expected()
    wanted = federation(UNEQUAL, batch_size=None).lower_samples.expected()
    np.testing.assert_array_equal(found.data[0], wanted.data[0])
