"""Small arrays side by side, and loops without copies, as on a GPU: the same states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod._misc import loops
from aipod.algorithms import _carried
from aipod.algorithms._carried import Layout
from tests.algorithms.test_keeping import KEY, UNEQUAL, WEIGHTS, federation, start
from tests.problems import synthetic

USERS = ("aipod.algorithms._carried", "aipod.slots._proxskip")


@pytest.fixture
def hosted(monkeypatch):
    """As if the host started every program."""
    for name in ("aipod._misc.loops", *USERS):
        monkeypatch.setattr(f"{name}.started_by_host", lambda: True)


CASES = {
    "everyone": (aipod.E3AiPOD(), {}),
    "weights": (aipod.E3AiPOD(), {"data": UNEQUAL, "batch_size": 2, "weights": WEIGHTS}),
    "a cohort": (aipod.E3AiPOD(), {"participation": 0.5}),
    "a cohort without memory": (aipod.E3AiPOD(memory=False), {"participation": 0.5}),
    "odd steps": (aipod.E3AiPOD(lower_steps=7, adjoint_steps=3), {}),
    "skipped projections": (aipod.EAiPOD(), {"participation": 0.5, "chosen": "step"}),
    "a quarter of the bytes": (aipod.E3AiPOD(compression="float8"), {}),
    "a cohort, 8 bits": (aipod.E3AiPOD(compression="float8"), {"participation": 0.5}),
}


def solved(solver, options, steps=25):
    solution = aipod.solve(
        federation(**options), solver, *start(), steps=steps, key=KEY, record=record, every=4
    )
    return solution.state, dict(solution.history)


def record(x, y):
    return {"size": jnp.sum(x["w"] ** 2) + jnp.sum(y**2)}


@pytest.mark.parametrize(
    ("name", "large"), [*((name, False) for name in CASES), ("everyone", True), ("odd steps", True)]
)
def test_a_program_for_a_gpu_makes_the_same_states(name, large, request, monkeypatch):
    wanted, columns = solved(*CASES[name])
    request.getfixturevalue("hosted")
    if large:
        monkeypatch.setattr(loops, "_LARGE", 0)
    found, others = solved(*CASES[name])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    for name in ("size", "samples", "rounds", "curvature"):
        np.testing.assert_allclose(others[name], columns[name], rtol=1e-9)


def test_a_problem_without_clients_too(request):
    case = synthetic()

    def state():
        solver = aipod.EAiPOD(lower_prob=0.3)
        return aipod.solve(case.problem, solver, case.x, case.y, steps=40, key=KEY).state

    wanted = state()
    request.getfixturevalue("hosted")
    for a, b in zip(jax.tree.leaves(state()), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@dataclasses.dataclass
class Point:
    """A state of few leaves, as a pytree."""

    leaves: list


jax.tree_util.register_dataclass(Point, ["leaves"], [])


def some_state():
    return Point(
        [
            jnp.arange(6.0).reshape(3, 2),
            jnp.arange(3.0) + 10,
            jnp.array(7.0),
            jnp.array(3, jnp.int32),
            jnp.arange(_carried._SMALL + 1.0),
            jnp.array([True, False, True]),
            jnp.arange(3.0 * 100).reshape(3, 100),
            jnp.zeros((0,)),
        ]
    )


OWN = (True, True, False, False, False, True, True, False)


def test_states_come_back_to_the_bit(hosted):
    state = some_state()
    layout = Layout.of(state, OWN)
    carried = layout.carried(state)
    # Numbers of clients, numbers of all, whole numbers and truth values; and what is large.
    assert len(carried.small) == 4
    assert len(carried.large) == 2
    for a, b in zip(layout.state(carried).leaves, state.leaves, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_rows_of_some_clients(hosted):
    """What belongs to clients has the rows of those that were taken, and the rest stays whole."""
    state, chosen = some_state(), np.array([2, 0])
    layout = Layout.of(state, OWN)
    taken = layout.by_array(lambda a, own: a[chosen] if own else a, layout.carried(state))
    for a, b, own in zip(layout.state(taken).leaves, state.leaves, OWN, strict=True):
        np.testing.assert_array_equal(a, b[chosen] if own else b)


def test_elsewhere_nothing_is_moved():
    state = some_state()
    for layout in (Layout.of(state, OWN), Layout.of(state, None, alone=False)):
        assert not layout.carried(state).small
        assert len(layout.carried(state).large) == len(state.leaves)
    assert not loops.started_by_host()
