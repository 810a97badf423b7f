"""Room for compiled programs, of which a process may have only so many."""

import jax
import jax.numpy as jnp
import numpy as np

import aipod
from aipod._misc import maps

KEY = jax.random.key(0)


def solved(shift):
    problem = aipod.Bilevel(
        lambda x, y, _: jnp.sum((y - shift) ** 2), lambda x, y, _: jnp.sum((y - x) ** 2)
    )
    solver = aipod.AiPOD(upper_lr=0.1, lower_lr=0.1, adjoint_lr=0.1)
    return aipod.solve(problem, solver, jnp.ones(2), jnp.zeros(2), steps=3, key=KEY)


def test_programs_are_freed_near_the_limit_and_compiled_again(monkeypatch, tmp_path):
    limit = tmp_path / "limit"
    monkeypatch.setattr(maps, "_LIMIT", limit)
    twice = jax.jit(lambda x: 2 * x)
    twice(1.0)
    limit.write_text("1000000\n")
    before = solved(1.0)
    assert twice._cache_size() == 1
    # Every compilation of a chunk now finds too many.
    limit.write_text("10\n")
    solved(2.0)
    assert twice._cache_size() == 0
    np.testing.assert_array_equal(solved(1.0).x, before.x)


def test_without_a_limit_nothing_is_freed(monkeypatch, tmp_path):
    for found in (None, "", "many"):
        limit = tmp_path / "limit"
        if found is not None:
            limit.write_text(found)
        monkeypatch.setattr(maps, "_LIMIT", limit)
        assert not maps.make_room()
    monkeypatch.setattr(maps, "_MAPS", tmp_path / "none")
    assert not maps.make_room(10)
