"""What `help` shows of a public name is short, and says the same as the types."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

import aipod
from aipod._misc.signatures import words_of

ALIASES = {"StepSize": aipod.stepsize.StepSize, "ArrayLike": ArrayLike, "Key": PRNGKeyArray}
PUBLIC = [
    getattr(room, name)
    for room in (aipod, aipod.federated, aipod.callbacks, aipod.data, aipod.stepsize)
    for name in dir(room)
    if not name.startswith("_") and callable(getattr(room, name))
]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_no_signature_shows_private_paths_or_unions_of_array_types(thing):
    things = [thing]
    if inspect.isclass(thing):
        things += [m for n, m in inspect.getmembers(thing, callable) if not n.startswith("_")]
    for one in things:
        try:
            shown = str(inspect.signature(one))
        except ValueError:
            continue  # of an exception, or of a type written in C
        for word in ("jaxtyping", "jaxlib", "._", " at 0x", "<lambda>", "<factory>", "ndarray | "):
            assert word not in shown, f"{one}: {shown}"
        assert len(shown) < 550


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (aipod.stepsize.StepSize, "StepSize"),
        (aipod.stepsize.StepSize | None, "StepSize | None"),
        (PyTree[ArrayLike] | None, "PyTree | None"),
        (ArrayLike | None, "ArrayLike | None"),
        (Float[Array, " rows"], "Array"),
        (Callable[[PyTree, PRNGKeyArray], Any], "Callable[[PyTree, Key], Any]"),
        (Callable[..., None], "Callable[..., None]"),
        (Sequence[aipod.Bilevel], "Sequence[Bilevel]"),
        (Literal["smaller", "larger"], "Literal['smaller', 'larger']"),
        (tuple[int, ...], "tuple[int, ...]"),
        ("Figure", "Figure"),
    ],
)
def test_words_of_types(annotation, words):
    assert words_of(annotation, ALIASES) == words


def test_a_readable_signature_has_the_parameters_and_defaults_of_the_function():
    shown = inspect.signature(aipod.AiPOD).parameters
    assert repr(shown["upper_lr"].annotation) == "StepSize | None"
    assert isinstance(shown["lower_lr"].default, aipod.Curvature)
    assert list(inspect.signature(aipod.Minibatches).parameters) == [
        *("data", "batch_size", "replace", "epochs")
    ]
