"""What a compiled step is written for."""

import jax.numpy as jnp

from aipod._misc import loops


def test_a_processor_starts_its_own_programs():
    assert not loops.started_by_host()


def test_what_is_large():
    large = {"a": jnp.zeros((2**11, 2**11), jnp.int8), "b": jnp.zeros(1, jnp.int8)}
    assert loops.is_large(large)
    assert not loops.is_large({"a": large["a"]})
