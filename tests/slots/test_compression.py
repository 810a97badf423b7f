"""How numbers are rounded in short messages."""

import numpy as np
import pytest

from aipod.slots._compression import KINDS, told

# How far a number may be off, as a share of itself, where it is not far below the largest.
WRONG = {"bfloat16": 2**-8, "float16": 2**-11, "float8": 1 / 16, "float4": 1 / 3}


@pytest.mark.parametrize("unit", [2.0**-60, 2.0**60])
@pytest.mark.parametrize("kind", KINDS)
def test_no_unit_is_too_small_or_too_large(kind, unit):
    rng = np.random.default_rng(0)
    message, known = rng.normal(size=(2, 4, 50))
    found = np.asarray(told(message, known, kind))
    np.testing.assert_array_equal(told(unit * message, unit * known, kind), unit * found)


@pytest.mark.parametrize("kind", KINDS)
def test_how_far_a_number_is_off(kind):
    rng = np.random.default_rng(1)
    message = rng.uniform(0.1, 1.0, (4, 50)) * rng.choice([-1.0, 1.0], (4, 50))
    found = np.asarray(told(message, np.zeros_like(message), kind))
    off = np.abs(found - message) / np.abs(message)
    # Each kind is rounded as far as it may be, and no further.
    assert 0.7 * WRONG[kind] < np.max(off) <= WRONG[kind] * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_new_changes_nothing(kind):
    known = np.random.default_rng(2).normal(size=(3, 7))
    np.testing.assert_array_equal(told(known, known, kind), known)
