"""Programs are found again by what they compute, and never when something has changed."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.solving import _programs

KEY = jax.random.key(0)
SCALE = 1.0


@pytest.fixture(autouse=True)
def no_programs(monkeypatch):
    monkeypatch.setattr(_programs, "_PROGRAMS", type(_programs._PROGRAMS)())


@pytest.fixture
def compiled(monkeypatch):
    """Counts the programs that were compiled."""
    count = []
    compile_lowered = _programs.compile_lowered

    def counting(lowered):
        count.append(1)
        return compile_lowered(lowered)

    monkeypatch.setattr(_programs, "compile_lowered", counting)
    return count


def lower(x, y, _):
    return 0.5 * jnp.sum((y - SCALE * x) ** 2)


def upper(x, y, _):
    return jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2)


def solve(problem, key=KEY, x0=None, steps=40):
    x0 = jnp.zeros(3) if x0 is None else x0
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.5)
    return aipod.solve(problem, solver, x0, jnp.zeros(3), steps, key=key).x


def test_the_next_seed_and_the_next_start_compile_nothing(compiled):
    problem = aipod.Bilevel(upper, lower)
    for seed in range(3):
        solve(problem, jax.random.key(seed), jnp.full(3, float(seed)))
    assert len(compiled) == 1


def test_functions_that_compute_the_same_share_a_program(compiled):
    """Tasks that are built anew for every seed, with arrays of their own."""

    def made(target):
        return aipod.Bilevel(
            lambda x, y, _: jnp.sum((y - target) ** 2) + 0.1 * jnp.sum(x**2),
            lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
        )

    found = [solve(made(jnp.full(3, value))) for value in (1.0, 2.0)]
    assert len(compiled) == 1
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-10)


def test_a_changed_global_is_noticed(monkeypatch):
    problem = aipod.Bilevel(upper, lower)
    before = solve(problem)
    monkeypatch.setitem(globals(), "SCALE", 0.5)
    fresh = aipod.Bilevel(upper, lambda x, y, _: 0.5 * jnp.sum((y - 0.5 * x) ** 2))
    after = solve(problem)
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, solve(fresh), rtol=1e-12)


def test_an_array_that_was_written_into_is_noticed():
    target = np.ones(3)
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - jnp.asarray(target)) ** 2) + 0.1 * jnp.sum(x**2), lower
    )
    before = solve(problem)
    target[:] = 3.0
    np.testing.assert_allclose(solve(problem), 3 * before, rtol=1e-10)


def test_an_objective_that_was_edited_is_noticed():
    class Loss:
        weight = 1.0

        def __call__(self, x, y, _):
            return jnp.sum((y - self.weight) ** 2) + 0.1 * jnp.sum(x**2)

    loss = Loss()
    problem = aipod.Bilevel(loss, lower)
    before = solve(problem)
    loss.weight = 2.0
    np.testing.assert_allclose(solve(problem), 2 * before, rtol=1e-10)


def test_another_callback_of_the_same_name_is_another_program():
    def made(value):
        def looked_up():
            return np.full(3, value)

        def upper(x, y, _):
            target = jax.pure_callback(looked_up, jax.ShapeDtypeStruct((3,), jnp.float64))
            return jnp.sum((y - target) ** 2) + 0.1 * jnp.sum(x**2)

        return aipod.Bilevel(upper, lower)

    one, two = (solve(made(value), steps=5) for value in (1.0, 2.0))
    np.testing.assert_allclose(two, 2 * one, rtol=1e-10)


def test_a_constant_inside_an_inner_jit_is_not_mistaken_for_another(compiled):
    def made(value):
        inner = jax.jit(lambda y: jnp.sum((y - jnp.asarray(np.full(3, value))) ** 2))
        return aipod.Bilevel(lambda x, y, _: inner(y) + 0.1 * jnp.sum(x**2), lower)

    one, two = (solve(made(value)) for value in (1.0, 2.0))
    np.testing.assert_allclose(two, 2 * one, rtol=1e-10)


def test_threads_share_the_programs_without_a_race(monkeypatch):
    """More problems than programs are kept, so that entries come and go all the time."""
    monkeypatch.setattr("aipod.solving._programs._KEPT", 2)
    problems = [aipod.Bilevel(upper, lower), *(_scaled(s) for s in (0.3, 0.6))]
    wanted = [np.asarray(solve(problem, steps=3)) for problem in problems]
    errors = []

    def work(offset):
        try:
            for i in range(4):
                index = (i + offset) % len(problems)
                found = solve(problems[index], steps=3)
                np.testing.assert_array_equal(found, wanted[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def _scaled(scale):
    return aipod.Bilevel(upper, lambda x, y, _: 0.5 * scale * jnp.sum((y - x) ** 2))


def test_xla_options_are_behind_a_setting(monkeypatch):
    from aipod.solving import _compile

    if jax.default_backend() == "cpu":
        assert _compile.compile_options()
    monkeypatch.setenv("AIPOD_TUNED_XLA", "0")
    assert _compile.compile_options() is None
    solve(aipod.Bilevel(upper, lower), steps=2)
