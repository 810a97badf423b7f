"""Slots of one's own: written from public names, and told in a sentence when they are wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod

KEY = jax.random.key(0)
PROBLEM = aipod.Bilevel(
    lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2),
    lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
    lower_set=aipod.Budget(1.0),
)
X = jnp.zeros(3)


class Lower(aipod.AbstractLower):
    """Projected gradient, and a count of the outer steps it has seen."""

    lr: float = 0.5

    def init(self, problem, x, y):
        return jnp.zeros((), jnp.int32)

    def run(self, turn, state):
        slope = turn.lower_gradient()(turn.y, turn.key)
        y = turn.lower_set.project(turn.y - turn.lr(self.lr) * slope)
        return y, state + 1, turn.lower_cost(1, lower_draws=1)


class Adjoint(aipod.AbstractAdjoint):
    """P grad_y f: right where G is the identity."""

    def solve(self, turn, upper_batch, state):
        return turn.lower_set.tangent(turn.upper_gradient_y(upper_batch)), state, turn.lower_cost(1)


class Upper(aipod.AbstractUpper):
    lr: float = 0.2

    def update(self, turn, z, implicit, batch, state):
        gradient = jax.grad(turn.problem.upper)(turn.x, turn.y, batch) + implicit
        return turn.x - turn.lr(self.lr) * gradient, state, turn.upper_cost(0)


def made(lower=None, adjoint=None, upper=None):
    return aipod.Alternating(lower or Lower(), adjoint or Adjoint(), upper or Upper())


def test_slots_from_public_names_solve_a_problem():
    solution = aipod.solve(PROBLEM, made(), X, X, 300, key=KEY)
    assert float(aipod.stationarity(PROBLEM, solution.x, X)) < 1e-12
    assert int(solution.state.lower) == 300
    assert solution.ledger.lower_projections == 300


def lower_returning(change):
    class Wrong(aipod.AbstractLower):
        lr: float = 0.5

        def run(self, turn, state):
            return change(turn, Lower().run(turn, jnp.zeros((), jnp.int32)))

    return made(lower=Wrong())


def adjoint_returning(change):
    class Wrong(aipod.AbstractAdjoint):
        def solve(self, turn, upper_batch, state):
            return change(turn, Adjoint().solve(turn, upper_batch, state))

    return made(adjoint=Wrong())


def upper_returning(change):
    class Wrong(aipod.AbstractUpper):
        def update(self, turn, z, implicit, batch, state):
            return change(turn, Upper().update(turn, z, implicit, batch, state))

    return made(upper=Wrong())


WRONG = {
    "lower-y-alone": (
        lower_returning(lambda turn, good: good[0]),
        r"Wrong.run must return \(y, its state, its cost\), but it returns one array",
    ),
    "lower-two-values": (lower_returning(lambda turn, good: good[:2]), "it returns 2 values"),
    "lower-nothing": (lower_returning(lambda turn, good: None), "it returns NoneType"),
    "lower-shape": (
        lower_returning(lambda turn, good: (good[0][:2], None, good[2])),
        r"Wrong.run returns y whose entry itself is float64\[2\], but was float64\[3\]",
    ),
    "lower-type": (
        lower_returning(lambda turn, good: (good[0].astype(jnp.float32), None, good[2])),
        r"returns y whose entry itself is float32\[3\]",
    ),
    "lower-structure": (
        lower_returning(lambda turn, good: ({"y": good[0]}, None, good[2])),
        "returns y with the structure",
    ),
    "lower-text": (
        lower_returning(lambda turn, good: ("y", None, good[2])),
        "Wrong.run returns y with a str in it: give arrays",
    ),
    "lower-state": (
        lower_returning(lambda turn, good: good),
        "returns its state with the structure .* keep the structure that init returns",
    ),
    "lower-cost": (
        lower_returning(lambda turn, good: (good[0], None, 5)),
        r"must return an aipod.Cost as its third value, but it returns a int",
    ),
    "lower-cost-text": (
        lower_returning(lambda turn, good: (good[0], None, aipod.Cost("five"))),
        r"returns a Cost whose projections is 'five'",
    ),
    "adjoint-z-alone": (
        adjoint_returning(lambda turn, good: good[0]),
        r"Wrong.solve must return \(z, its state, its cost\)",
    ),
    "adjoint-like-x": (
        adjoint_returning(lambda turn, good: (jnp.zeros(5), *good[1:])),
        r"Wrong.solve returns z whose entry itself is float64\[5\]",
    ),
    "upper-x-alone": (
        upper_returning(lambda turn, good: good[0]),
        r"Wrong.update must return \(x, its state, its cost\)",
    ),
    "upper-new-state": (
        upper_returning(lambda turn, good: (good[0], jnp.zeros(()), good[2])),
        "Wrong.update returns its state with the structure",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_slot_gets_a_sentence(name):
    solver, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        aipod.solve(PROBLEM, solver, X, X, 3, key=KEY)


def test_other_answers_of_a_wrong_slot_get_a_sentence():
    class Text(Lower):
        def init(self, problem, x, y):
            return "nothing"

    class Draws(Adjoint):
        draws = 3

    class Hidden(aipod.AbstractLower):
        lr: float = 0.5
        other: aipod.Curvature = aipod.Curvature()

        def run(self, turn, state):
            return turn.y * turn.lr(self.other), state, turn.lower_cost()

    class Flat(aipod.AbstractSet):
        def project(self, y, x=None):
            return jnp.ravel(y)[:1]

        def tangent(self, v):
            return v

        def anchor(self, x=None, *, like=None):
            return like

        def residual(self, y, x=None):
            return y

    with pytest.raises(ValueError, match=r"Text.init returns a state with a str in it"):
        made(lower=Text()).init(PROBLEM, X, X)
    with pytest.raises(ValueError, match=r"Draws.draws must be two numbers"):
        aipod.solve(PROBLEM, made(adjoint=Draws()), X, X, 3, key=KEY)
    with pytest.raises(ValueError, match="name the field so, or give a number"):
        aipod.solve(PROBLEM, made(lower=Hidden()), X, X, 3, key=KEY)
    problem = aipod.Bilevel(PROBLEM.upper, PROBLEM.lower, lower_set=Flat())
    with pytest.raises(ValueError, match=r"lower_set.project returns shapes \[\(1,\)\]"):
        made().init(problem, X, X)


def test_a_function_is_no_slot():
    with pytest.raises(ValueError, match="lower must be a slot made for it, got function"):
        made(lower=lambda turn: turn)


def test_a_method_without_the_implicit_term_neither_computes_nor_pays_for_it():
    def lower(x, y, batch):
        # Its derivative with respect to x would be infinite.
        return 0.5 * jnp.sum((y - jnp.sqrt(jnp.abs(x) * 0.0)) ** 2) + 0.0 * batch

    class Draws(aipod.AbstractSampler):
        size: int = 7

        def __call__(self, key):
            return jax.random.uniform(key)

    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((x - 1.0) ** 2) + jnp.sum(y), lower, lower_samples=Draws()
    )
    solution = aipod.solve(
        problem, aipod.FedAvg(upper_lr=0.1, lower_lr=0.1, lower_steps=2), X, X, 5, key=KEY
    )
    assert np.isfinite(solution.x).all()
    assert solution.ledger.lower_samples == 5 * 2 * 7


@pytest.mark.parametrize("optimised", [False, True])
def test_the_difference_step_books_what_the_plain_step_books(optimised):
    import optax

    how = {"optimizer": optax.adam(0.01)} if optimised else {"lr": 0.01}
    lower = aipod.ProjectedSGD(lr=0.5)
    plain = aipod.Alternating(lower, aipod.PerturbedLower(lower), aipod.EveryStep(**how))
    difference = aipod.Alternating(lower, aipod.PerturbedLower(lower), aipod.DifferenceStep(**how))
    one, two = (aipod.solve(PROBLEM, s, X, X, 4, key=KEY).ledger for s in (plain, difference))
    assert one.upper_projections == two.upper_projections == 4 * (2 if optimised else 1)
    assert one.lower_samples == two.lower_samples


def test_the_perturbed_level_is_settled_also_by_a_slot_that_projects_at_the_end():
    """Unsettled, y_delta is off the set and the hypergradient is wrong by far."""
    rates = aipod.stepsize.Rates(jnp.zeros((), jnp.int32), None)
    y = aipod.exact_lower(PROBLEM, X, X)
    turn = aipod.Turn(PROBLEM, X, y, rates, KEY)
    wanted, *_ = aipod.Direct().solve(turn, None, None)
    lower = aipod.OneRound(lr=0.5, steps=20)
    adjoint = aipod.PerturbedLower(lower, delta=1e-4)
    state = adjoint.init(PROBLEM, X, y)
    for _ in range(12):
        z, state, _ = adjoint.solve(turn, None, state)
    np.testing.assert_allclose(z, wanted, atol=1e-3)
    assert float(jnp.abs(jnp.sum(z))) < 1e-8


def test_the_older_spelling_makes_the_one_round_slots():
    assert type(aipod.ProxSkip(prob=None, lr=0.1)) is aipod.OneRound
    assert aipod.ProxSkip(prob=None).steps == aipod.ProxSkip().steps
    adjoint = aipod.ProxSkipAdjoint(3, 0.1, None, warm=True)
    assert adjoint == aipod.OneRoundAdjoint(3, 0.1, damping=0.0)
    assert type(aipod.ProxSkip(0.1, 5, 0.3)) is aipod.ProxSkip


@pytest.mark.parametrize("solver", [aipod.AiPOD, aipod.EAiPOD, aipod.E2AiPOD, aipod.E3AiPOD])
def test_leaves_of_several_floating_point_types(solver):
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y["a"] - 1.0) ** 2) + jnp.sum((y["b"] - x) ** 2),
        lambda x, y, _: jnp.sum((y["a"] - x) ** 2) + 3 * jnp.sum((y["b"] - x) ** 2),
    )
    y0 = {"a": jnp.zeros(2, jnp.float32), "b": jnp.zeros(2, jnp.float64)}
    solution = aipod.solve(problem, solver(upper_lr=0.05), jnp.zeros(2), y0, 20, key=KEY)
    assert (solution.y["a"].dtype, solution.y["b"].dtype) == (jnp.float32, jnp.float64)
    assert np.isfinite(solution.x).all()
