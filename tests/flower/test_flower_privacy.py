"""Attacks on a client's privacy: a server that asks for anything, and what leaves then."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flwr")

import aipod
from aipod import federated, flower
from aipod.flower import _account, _apps, _gate, _noise
from aipod.flower._account import FOLDER, BudgetError
from aipod.flower._accounting import delta_of, epsilon_of
from aipod.flower._client import Session
from aipod.flower._gate import failure
from aipod.flower._kept import Shelf
from aipod.flower._local import initial_state
from aipod.flower._parcel import Parcel
from aipod.flower._parts import shared_leaves
from aipod.flower._post import from_records
from aipod.flower._privacy import with_floor
from tests.federated.test_federated import client_data, ridge_lower, ridge_upper
from tests.flower.flower_grid import InProcessGrid, context

FIXED = {
    "lower_lr": 0.1,
    "adjoint_lr": 0.1,
    "lower_steps": 3,
    "adjoint_steps": 2,
    "damping": 0.0,
}
E3 = aipod.E3AiPOD(upper_optimizer=optax.sgd(0.05, momentum=0.5), **FIXED)
CLIP, NOISE = 0.1, 2.0
PRIVACY = flower.Privacy(clip=CLIP, noise=NOISE)
FIRST = {"run": "abc", "seed": 1, "last": 100, "every": 1, "turn": 0, "step": -1, "reset": True}


@pytest.fixture(scope="module")
def clients():
    """The same client with different data, and with data on which it diverges at once."""
    data = client_data(2, 6)
    problem = federated.federate(ridge_upper, ridge_lower, data, data, batch_size=3)
    x0, y0 = (federated.replicate(jnp.full(3, v), 2) for v in (0.3, -0.2))
    one, other = (flower.client_of(problem, x0, y0, index=index) for index in range(2))
    other = dataclasses.replace(other, index=0)
    huge = jax.tree.map(lambda leaf: 1e200 * leaf, one.lower_data)
    return one, other, dataclasses.replace(one, lower_data=huge)


def start(client, solver=E3, **values):
    """The shared part of a state, by default where a run starts."""
    state = initial_state(solver, client.x, client.y, client.within)
    state = dataclasses.replace(
        state, **{k: jnp.full_like(getattr(state, k), v) for k, v in values.items()}
    )
    return {f"shared:{name}": value for name, value in shared_leaves(solver, state).items()}


def first(client, solver=E3, **words):
    return Parcel(FIRST | words, start(client, solver))


def answers(step, reply, value=0.1, leave_out=()):
    """Something for everything that was asked."""
    named = {
        "answer:" + name.removeprefix("asked:").rpartition(".")[0]: np.full_like(asked, value)
        for name, asked in reply.arrays.items()
        if name.startswith("asked:")
    }
    kept = {name: v for name, v in named.items() if name not in leave_out}
    words = {k: v for k, v in FIRST.items() if k != "reset"} | {"turn": step + 1, "step": step}
    return Parcel(words, kept)


def asked(parcel):
    return {name: value for name, value in parcel.arrays.items() if name.startswith("asked:")}


def releases(folder):
    path = folder / FOLDER / "client-0.json"
    return json.loads(path.read_text())["releases"] if path.exists() else 0


@pytest.fixture
def quiet(monkeypatch):
    """No noise, to see what is under it."""
    monkeypatch.setattr(_noise, "_normal", lambda count: np.zeros(count))


@pytest.mark.parametrize(
    "flags",
    [
        {"leave": True, "pause": True},
        {"leave": True, "pause": True, "reset": True},
        {"leave": True, "every": 1},
        {"leave": True, "last": 1},
    ],
)
def test_a_step_that_a_client_ends_alone_is_never_seen(clients, tmp_path, flags):
    """The server asks a client to end its step alone, and to send x, y and u afterwards."""
    session = Session(clients[0], E3, tmp_path, PRIVACY)
    reply = session.handle(first(clients[0]))
    words = answers(0, reply).words | flags
    with pytest.raises(ValueError, match="without noise, so it is refused"):
        session.handle(Parcel(words))
    # Nothing of it was kept either: the next request does not show it.
    paused = session.handle(Parcel(words | {"leave": False, "pause": True, "step": -1, "last": 9}))
    assert paused.words["step"] == 0
    for name, value in paused.group("shared").items():
        np.testing.assert_array_equal(value, start(clients[0])[f"shared:{name}"])


def test_two_messages_of_one_step_with_other_content_have_other_noise(
    clients, tmp_path, monkeypatch
):
    """An honest reset after a lost disk is enough for that; so is a server that lies about y."""
    session = Session(clients[0], E3, tmp_path, PRIVACY)
    once = asked(session.handle(first(clients[0])))
    moved = Parcel(FIRST, start(clients[0], y=-0.2 + 1e-9))
    again = asked(session.handle(moved))
    assert releases(tmp_path) == 2
    back = asked(session.handle(first(clients[0])))
    assert releases(tmp_path) == 3
    monkeypatch.setattr(_noise, "_normal", lambda count: np.zeros(count))
    bare = asked(Session(clients[0], E3, tmp_path / "b", PRIVACY).handle(first(clients[0])))
    for pair in ((once, again), (once, back), (again, back)):
        for name in bare:
            # As far apart as two draws of the noise are, and not as two contents are.
            assert np.abs(pair[0][name] - pair[1][name]).max() > 0.05 * NOISE * CLIP


def test_the_same_message_is_sent_again_and_counts_once(clients, tmp_path):
    """A reply that was lost is repeated; also by a new process."""
    once = Session(clients[0], E3, tmp_path, PRIVACY).handle(first(clients[0]))
    again = Session(clients[0], E3, tmp_path, PRIVACY).handle(first(clients[0]))
    for name, value in asked(once).items():
        np.testing.assert_array_equal(value, again.arrays[name])
    assert releases(tmp_path) == 1


@pytest.mark.parametrize("remove", [True, False], ids=["removed", "rolled back"])
def test_an_account_that_has_lost_releases_lets_nothing_out(clients, tmp_path, remove):
    """The run itself remembers how many there were."""
    session = Session(clients[0], E3, tmp_path, PRIVACY)
    account = tmp_path / FOLDER / "client-0.json"
    reply = session.handle(first(clients[0]))
    old = account.read_text()
    reply = session.handle(answers(0, reply))
    account.unlink() if remove else account.write_text(old)
    with pytest.raises(ValueError, match="and there were 2 at least"):
        session.handle(answers(1, reply))


def test_a_crash_before_the_message_is_kept_counts_and_the_noise_is_fresh(
    clients, tmp_path, monkeypatch
):
    session = Session(clients[0], E3, tmp_path, PRIVACY)
    drawn, normal = [], _noise._normal

    def kept(count):
        drawn.append(normal(count))
        return drawn[-1]

    monkeypatch.setattr(_noise, "_normal", kept)

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            session.handle(first(clients[0]))
    assert releases(tmp_path) == 1
    session.handle(first(clients[0]))
    assert releases(tmp_path) == 2
    assert np.abs(drawn[0] - drawn[3]).max() > 0.1


def test_what_leaves_is_cut(clients, tmp_path, quiet):
    """Whatever the answers were; without noise the cut shows."""
    # Without momentum a step begins at the last answer, from which changes are cut.
    plain = dict.fromkeys(("lower_optimizer", "adjoint_optimizer"), optax.sgd(1.0))
    solver = aipod.E3AiPOD(upper_optimizer=optax.sgd(0.05, momentum=0.5), **FIXED, **plain)
    session = Session(clients[0], solver, tmp_path, PRIVACY)
    reply = session.handle(first(clients[0], solver))
    known = {"asked:x.0.2": 0.0, "asked:y.0.1": -0.2, "asked:y.1.1": 0.0}
    for step in range(3):
        lengths = {n: np.linalg.norm(v - known[n]) for n, v in asked(reply).items()}
        assert set(lengths) == set(known)
        assert all(length <= CLIP * (1 + 1e-12) for length in lengths.values())
        assert max(lengths.values()) > 0.9 * CLIP
        reply = session.handle(answers(step, reply, value=3.0))
        known = {"asked:x.0.2": 0.0, "asked:y.0.1": 3.0, "asked:y.1.1": 3.0}


def test_a_step_size_upstairs_cuts_the_move_of_x_and_not_x(clients, tmp_path, quiet):
    solver = aipod.E3AiPOD(
        upper_lr=0.05, lower_lr=0.1, adjoint_lr=0.1, lower_steps=3, adjoint_steps=2, damping=0.0
    )
    state = initial_state(solver, clients[0].x, clients[0].y)
    shared = {f"shared:{n}": v for n, v in shared_leaves(solver, state).items()}
    reply = Session(clients[0], solver, tmp_path, PRIVACY).handle(Parcel(FIRST, shared))
    moved = reply.arrays["asked:x.0.1"] - 0.3
    assert 0 < np.linalg.norm(moved) <= CLIP * (1 + 1e-12)


def test_the_noise_is_gaussian_of_the_size_that_was_promised():
    change = np.full(40_000, 1e-3)
    grid = _noise.grid_of(NOISE * CLIP)
    steps = _noise.noisy(change, CLIP, grid, NOISE * CLIP)
    np.testing.assert_array_equal(steps, np.rint(steps))
    noise = steps * grid / (NOISE * CLIP)
    assert abs(noise.std() - 1) < 0.03
    for bound, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert abs(np.mean(np.abs(noise) > bound) - share) < 4 * math.sqrt(share / noise.size)
    assert np.abs(_noise.noisy(change, CLIP, grid, NOISE * CLIP) - steps).max() > 1


def hidden(session, request):
    """A reply without the three noisy vectors: by the server's own knowledge it must be the same
    for all data."""
    try:
        reply = session.handle(request)
    except ValueError as error:
        return failure(error, session.gate.private).words, {}, None
    rest = {n: np.asarray(v) for n, v in reply.arrays.items() if not n.startswith("asked:")}
    names = {n: (v.dtype, v.shape) for n, v in asked(reply).items()}
    return reply.words, rest | {"names": names}, reply


@pytest.mark.parametrize("bounds", [False, True])
def test_nothing_but_noise_depends_on_the_data(clients, tmp_path, bounds):
    """Requests with any flags, any steps, any answers and any states: the replies of clients with
    different data, also of one that diverges, are the same but for the noisy vectors.

    With bounds: also which of them are active, and what they push back.
    """
    if bounds:
        sets = {"upper_set": aipod.Box(0.1, 0.5), "lower_set": aipod.CappedSimplex(1.0, 0.5)}
        clients = [dataclasses.replace(client, **sets) for client in clients]
    sessions = [
        Session(client, E3, tmp_path / str(place), PRIVACY) for place, client in enumerate(clients)
    ]
    rng = np.random.default_rng(0)
    request, failed, steps = first(clients[0]), 0, set()
    last = None
    for turn in range(70):
        replies = [hidden(session, request) for session in sessions]
        words, rest, reply = replies[0]
        for other_words, other, _ in replies[1:]:
            assert other_words == words
            assert other.keys() == rest.keys()
            for name, value in rest.items():
                np.testing.assert_array_equal(other[name], value, err_msg=name)
        failed += reply is None
        last = reply or last
        step = int(last.words["step"])
        steps.add(step)
        odd = turn > 25 and rng.random() < 0.6
        names = ["answer:x.0", "answer:y.0", "answer:y.1"]
        left_out = rng.choice(names, rng.integers(0, 3)) if odd else ()
        request = answers(step, last, rng.normal(), left_out)
        words = dict(request.words)
        if odd:
            flags = rng.random(4) < 0.35
            words |= dict(zip(("leave", "pause", "reset"), map(bool, flags), strict=False))
            words |= {
                "step": int(rng.choice([step, -1, step + 1])),
                "last": int(rng.integers(1, 99)),
            }
            if turn % 3 == 0 and not bounds:
                words |= {
                    "secure": bool(rng.random() < 0.5),
                    "seed": int(rng.integers(9)),
                    "every": int(rng.integers(1, 4)),
                }
        arrays = dict(request.arrays)
        if odd and rng.random() < 0.3:
            arrays |= start(clients[0], y=rng.normal(), step=max(step, 1))
        request = Parcel(words, arrays)
    assert failed > 1
    assert len(steps) > 15


def test_a_budget_holds_over_all_runs_and_processes(clients, tmp_path):
    """The server chooses the names of runs, and may start as many as it likes."""
    allowed = flower.Privacy(CLIP, NOISE).epsilon(3)
    privacy = flower.Privacy(CLIP, NOISE, budget=allowed * 1.001)
    for run in ("a", "b", "c"):
        Session(clients[0], E3, tmp_path, privacy).handle(first(clients[0], run=run))
    for run in ("d", "a"):
        moved = Parcel(FIRST | {"run": run}, start(clients[0], y=0.5))
        with pytest.raises(BudgetError, match="after 3 releases"):
            Session(clients[0], E3, tmp_path, privacy).handle(moved)
    assert releases(tmp_path) == 3
    # What has left already may leave again.
    Session(clients[0], E3, tmp_path, privacy).handle(first(clients[0], run="c"))
    # Another run with more noise does not make it forget, and with a larger budget it goes on.
    loud = flower.Privacy(CLIP, 10 * NOISE, budget=allowed * 1.001)
    with pytest.raises(BudgetError):
        Session(clients[0], E3, tmp_path, loud).handle(first(clients[0], run="e"))
    loud = flower.Privacy(CLIP, 10 * NOISE, budget=allowed * 1.1)
    Session(clients[0], E3, tmp_path, loud).handle(first(clients[0], run="e"))


def test_accounts_of_two_processes_at_once_count_both(tmp_path):
    import threading

    def spend():
        for _ in range(20):
            _account.Account(tmp_path, 0).spend(0.1, None, 1e-5)

    threads = [threading.Thread(target=spend) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count, spent = _account.Account(tmp_path, 0).read()
    assert count == 40
    assert spent == pytest.approx(0.4)


@pytest.mark.parametrize(("noise", "count"), [(3.0, 1), (30.0, 50), (60.0, 300)])
def test_epsilon_agrees_with_two_other_accountants(noise, count):
    """Google's, by Renyi divergences (an upper bound) and by numerical convolution."""
    from dp_accounting import dp_event, rdp
    from dp_accounting.pld import PLDAccountant

    event = dp_event.GaussianDpEvent(noise / (2 * math.sqrt(3)))
    upper = rdp.RdpAccountant().compose(event, count).get_epsilon(1e-5)
    exact = PLDAccountant().compose(event, count).get_epsilon(1e-5)
    found = flower.Privacy(clip=0.5, noise=noise).epsilon(count)
    assert exact == pytest.approx(found, rel=2e-3)
    assert found < upper < 1.25 * found


def test_epsilon_agrees_with_the_integral_of_two_densities():
    """delta = integral of max(0, p - e^epsilon q) over two Gaussians mu apart."""
    mu = 0.8
    z = np.linspace(-12, 12, 200_001)
    p, q = (np.exp(-((z - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0.0))
    for epsilon in (0.1, 1.0, 3.0):
        delta = np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), z)
        assert delta_of(epsilon, mu) == pytest.approx(delta, rel=1e-5)
        assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-4)


FLOOR = {"privacy-clip": 0.1, "privacy-noise": 30.0, "privacy-epsilon": 2.0, "privacy-delta": 1e-6}


@pytest.mark.parametrize(
    ("asked_for", "node", "expected"),
    [
        (None, {}, None),
        (PRIVACY, {"partition-id": 0}, PRIVACY),
        (None, FLOOR, flower.Privacy(0.1, 30.0, 2.0, 1e-6)),
        (flower.Privacy(9.0, 0.1), FLOOR, flower.Privacy(0.1, 30.0, 2.0, 1e-6)),
        (flower.Privacy(0.01, 90.0, 1.0, 1e-9), FLOOR, flower.Privacy(0.01, 90.0, 1.0, 1e-9)),
        (flower.Privacy(9.0, 0.1), {"privacy-noise": "5"}, flower.Privacy(9.0, 5.0)),
        (PRIVACY, {"privacy-epsilon": 3}, flower.Privacy(CLIP, NOISE, 3.0)),
    ],
)
def test_a_node_s_own_configuration_is_a_floor(asked_for, node, expected):
    assert with_floor(asked_for, node) == expected


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"privacy-noise": 1.0}, "the app has none"),
        ({"privacy-noise": "much", "privacy-clip": 1}, "privacy-noise must be a positive number"),
        ({"privacy-clip": 0.0, "privacy-noise": 1}, "privacy-clip must be a positive number"),
        ({"privacy_noise": 1.0}, "privacy_noise means nothing here"),
    ],
)
def test_a_floor_that_cannot_be_held_is_told(node, message):
    with pytest.raises(ValueError, match=message):
        with_floor(None, node)


def test_no_run_configuration_switches_a_node_s_privacy_off(clients, tmp_path, monkeypatch):
    """The whole app, in process: a run without privacy, on a node that asks for it."""
    monkeypatch.setattr(_apps._log, "error", lambda *words, **more: None)
    node = {"state-dir": str(tmp_path / "states"), "partition-id": 0} | FLOOR
    alone = dataclasses.replace(clients[0], clients=1)
    app = flower.make_client_app(lambda context: alone, E3, privacy=lambda _: None, cache=False)
    sent = []

    def listened(message, context):
        sent.append(app(message, context))
        return sent[-1]

    grid = InProcessGrid(listened, {100: context(100, node_config=node)})
    server = flower.make_server_app(E3, lambda _: flower.Start(jnp.zeros(3), jnp.zeros(3)))
    with pytest.raises(RuntimeError, match="PrivateError"):
        server(grid, context(0, run_config={"outer-steps": 60, "wait": 0.2, "min-nodes": 1}))
    spent = flower.Privacy(0.1, 30.0)
    count = releases(tmp_path / "states")
    assert spent.epsilon(count, 1e-6) <= 2.0 < spent.epsilon(count + 1, 1e-6)
    told = [from_records(reply.content) for reply in sent]
    assert sum(bool(asked(parcel)) for parcel in told) == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "clip must be positive"),
        ({"noise": math.nan}, "noise must be positive"),
        ({"budget": -1.0}, "budget must be positive"),
        ({"delta": 1.0}, "delta must be in"),
    ],
)
def test_bad_terms_of_privacy_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRIVACY, **change)


def test_messages_are_made_by_the_gate_alone():
    """What leaves a client is a parcel; no other file of the client's side makes one."""
    from pathlib import Path

    for name in ("_client.py", "_local.py", "_mailbox.py"):
        assert "Parcel(" not in (Path(_gate.__file__).parent / name).read_text(), name
