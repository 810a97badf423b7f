"""An Equinox module as x and y, with its activation function inside."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.diagnose._findings import Notes
from aipod.diagnose._parts import check_fit
from aipod.federated import average, federate, replicate

KEYS = jax.random.split(jax.random.key(0), 4)
BODY = eqx.nn.MLP(3, 4, 4, 1, activation=jnp.tanh, key=KEYS[0])
HEAD = eqx.nn.Sequential([eqx.nn.Linear(4, 1, key=KEYS[1]), eqx.nn.Lambda(jax.nn.softplus)])
INPUTS = jax.random.normal(KEYS[2], (16, 3))
TARGETS = jnp.abs(jnp.sin(INPUTS.sum(axis=1)))
SOLVER = aipod.AiPOD(upper_lr=0.1, lower_lr=0.1, lower_steps=2, adjoint_steps=2, adjoint_lr=0.1)
KEY = jax.random.key(1)


def loss(x, y, data):
    found = jax.vmap(lambda one: y(x(one)))(data[0])[:, 0]
    return jnp.mean((found - data[1]) ** 2)


def lower(x, y, data):
    squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(eqx.filter(y, eqx.is_array))]
    return loss(x, y, data) + sum(squares)


SAMPLES = aipod.FullBatch((INPUTS, TARGETS))
PROBLEM = aipod.Bilevel(loss, lower, upper_samples=SAMPLES, lower_samples=SAMPLES)


def same(one, other):
    # Which functions they hold, and all numbers.
    assert eqx.tree_equal(one, other, typematch=True)


@pytest.fixture(scope="module")
def solution():
    return aipod.solve(PROBLEM, SOLVER, BODY, HEAD, 6, key=KEY)


def test_the_same_numbers_as_with_eqx_partition(solution):
    (x0, y0), (fixed_x, fixed_y) = eqx.partition((BODY, HEAD), eqx.is_inexact_array)

    def whole(function):
        return lambda x, y, data: function(eqx.combine(x, fixed_x), eqx.combine(y, fixed_y), data)

    apart = aipod.Bilevel(whole(loss), whole(lower), upper_samples=SAMPLES, lower_samples=SAMPLES)
    wanted = aipod.solve(apart, SOLVER, x0, y0, 6, key=KEY)
    same(solution.x, eqx.combine(wanted.x, fixed_x))
    same(solution.y, eqx.combine(wanted.y, fixed_y))


def test_a_solution_is_a_module_that_can_be_called(solution):
    assert solution.x.activation is jnp.tanh
    assert solution.y[1].fn is jax.nn.softplus
    assert solution.y(solution.x(INPUTS[0])).shape == (1,)
    for one, other in zip(solution.feasible(), (solution.x, solution.y), strict=True):
        same(one, other)
    again = aipod.solve(PROBLEM, SOLVER, solution.x, solution.y, 1, key=KEY)
    assert not eqx.tree_equal(again.x, solution.x)


def test_resumed_from_a_checkpoint_saved_and_called_back(solution, tmp_path):
    seen = []

    def callback(step, x, y, row):
        seen.append(y(x(INPUTS[0])))
        return step >= 3

    options = {"key": KEY, "checkpoint": tmp_path / "state", "every": 1}
    record = {"record": lambda x, y: {"loss": loss(x, y, (INPUTS, TARGETS))}}
    first = aipod.solve(PROBLEM, SOLVER, BODY, HEAD, 3, callbacks=[callback], **options, **record)
    assert seen
    assert np.isfinite(first.history["loss"]).all()
    last = aipod.solve(PROBLEM, SOLVER, BODY, HEAD, 6, resume=True, **options, **record)
    same(last.x, solution.x)
    same(last.y, solution.y)
    last.save(tmp_path / "solution.npz")
    loaded = aipod.load(tmp_path / "solution.npz", BODY, HEAD)
    same(loaded.y, solution.y)


def test_clients_of_a_federation_hold_modules():
    data = (INPUTS.reshape(2, 8, 3), TARGETS.reshape(2, 8))
    problem = federate(loss, lower, data, data, batch_size=None)
    solver = aipod.E3AiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1, lower_steps=2)
    x0, y0 = replicate(BODY, 2), replicate(HEAD, 2)
    assert x0.activation is jnp.tanh
    solution = aipod.solve(problem, solver, x0, y0, 3, key=KEY)
    body, head = average(solution.x), average(solution.y, jnp.ones(2))
    assert head(body(INPUTS[0])).shape == (1,)


def test_derivatives_and_checks_take_modules_too():
    gradient = aipod.hypergradient(PROBLEM, BODY, HEAD, aipod.Neumann(2, lr=0.1))
    assert len(jax.tree.leaves(gradient)) == len(jax.tree.leaves(eqx.filter(BODY, eqx.is_array)))
    notes = Notes()
    assert check_fit(notes, PROBLEM, BODY, HEAD) is not None


def test_other_things_in_a_module_are_refused_with_a_remedy():
    module = eqx.nn.Sequential([HEAD, eqx.nn.Dropout(0.5)])
    with pytest.raises(ValueError, match=r"found bool: .*equinox\.partition"):
        aipod.solve(PROBLEM, SOLVER, BODY, module, 1, key=KEY)
