"""How loops are written where the host starts every turn of them."""

import jax.numpy as jnp
import pytest

from aipod._misc import loops


@pytest.fixture
def hosted(monkeypatch):
    monkeypatch.setattr(loops, "started_by_host", lambda: True)


def test_a_processor_starts_its_own_loops():
    assert not loops.started_by_host()
    assert loops.unrolled(10, jnp.zeros(3)) == 1


@pytest.mark.parametrize(
    ("count", "written"), [(0, 1), (1, 1), (2, 2), (7, 7), (10, 10), (11, 1), (20, 10), (24, 8)]
)
def test_so_many_turns_are_written_out(hosted, count, written):
    assert loops.unrolled(count, jnp.zeros(3)) == written


def test_loops_over_large_points_stay_loops(hosted):
    large = {"a": jnp.zeros((2**11, 2**11), jnp.int8), "b": jnp.zeros(1, jnp.int8)}
    assert loops.is_large(large)
    assert not loops.is_large({"a": large["a"]})
    assert loops.unrolled(10, large) == 1
