"""Digests are those that are written in the files of earlier versions."""

import hashlib

import numpy as np

from aipod._misc.digest import digest_arrays, digest_text


def test_arrays_differ_by_name_type_shape_and_value():
    a = np.arange(6.0)
    cases = [
        [("a", a)],
        [("b", a)],
        [("a", a.astype(np.float32))],
        [("a", a.reshape(2, 3))],
        [("a", a + 1)],
        [("a", a), ("b", a)],
    ]
    found = [digest_arrays(case) for case in cases]
    assert len(set(found)) == len(cases)
    assert all(len(text) == 32 for text in found)
    assert digest_arrays([("", a.reshape(2, 3).T.copy().T)]) == digest_arrays(
        [("", a.reshape(2, 3))]
    )


def test_the_values_are_those_of_old_files():
    plain = hashlib.sha256(b"xint32(2,)" + np.array([1, 2], np.int32).tobytes()).hexdigest()
    assert digest_arrays([("x", np.array([1, 2], np.int32))]) == plain[:32]
    text = "lambda <f at 0x7f0a>, 0x1"
    kept = hashlib.sha256(b"lambda <f at 0x>, 0x").hexdigest()
    whole = hashlib.sha256(b"lambda <f>, 0x1").hexdigest()
    assert digest_text(text) == kept[:32]
    assert digest_text(text, digits=16, keep_at=False) == whole[:16]
