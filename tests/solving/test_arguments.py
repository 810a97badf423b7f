"""Bad arguments of `solve` get one sentence, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod

KEY = jax.random.key(0)
PROBLEM = aipod.Bilevel(
    lambda x, y, _: jnp.sum((y - 1.0) ** 2), lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2)
)
SOLVER = aipod.AiPOD(upper_lr=0.1, lower_lr=0.5)
X = jnp.zeros(2)


def solve(x0=X, y0=X, steps=3, key=KEY, **more):
    return aipod.solve(PROBLEM, SOLVER, x0, y0, steps, key=key, **more)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def too_late(*args):
        pytest.fail("the input was not checked before compiling")

    monkeypatch.setattr("aipod.solving._run.Program", too_late)


BAD = {
    "every-too-large": (lambda: solve(every=2**31), "every must be a whole number.*below"),
    "every-float": (lambda: solve(every=1.0), "every must be a whole number"),
    "steps-too-large": (lambda: solve(steps=2**31), "steps must be a whole number.*below"),
    "steps-bool": (lambda: solve(steps=True), "steps must be a whole number"),
    "stop-number": (lambda: solve(stop=100), "stop must be an aipod.Stop"),
    "stop-dict": (lambda: solve(stop={"steps": 5}), "stop must be an aipod.Stop"),
    "stop-steps": (lambda: aipod.Stop(steps=2.5), "Stop: steps must be a whole number"),
    "stop-text": (lambda: aipod.Stop(seconds="1"), "Stop: seconds must be a number"),
    "stop-nan": (lambda: aipod.Stop(seconds=float("nan")), "Stop: seconds must be positive"),
    "stop-tolerance": (lambda: aipod.Stop(tolerance={"a": None}), "tolerance of 'a' must be a"),
    "stop-tolerance-nan": (lambda: aipod.Stop(tolerance={"a": np.nan}), "tolerance of 'a' must"),
    "y0-none": (lambda: solve(y0=None), "y0 holds no numbers"),
    "x0-empty": (lambda: solve(x0={}), "x0 holds no numbers"),
    "checkpoint-empty": (lambda: solve(checkpoint=""), "checkpoint must be a folder"),
    "checkpoint-number": (lambda: solve(checkpoint=3), "checkpoint must be a folder"),
    "checkpoint-seconds": (
        lambda: solve(checkpoint="unused", checkpoint_seconds=0),
        "checkpoint_seconds must be positive",
    ),
    "record-text": (lambda: solve(record="loss"), "record must be a function"),
    "under-jit": (lambda: jax.jit(lambda x: solve(x0=x).x)(X), "inside jit, vmap or grad"),
    "under-vmap": (lambda: jax.vmap(lambda x: solve(x0=x).x)(jnp.ones((2, 2))), "inside jit, vm"),
    "under-grad": (lambda: jax.grad(lambda x: solve(x0=x).x.sum())(X), "inside jit, vmap or grad"),
    "constant-under-jit": (lambda: jax.jit(lambda: solve().x)(), "inside jit, vmap or grad"),
    "key-under-vmap": (
        lambda: jax.vmap(lambda key: solve(key=key).x)(jax.random.split(KEY, 2)),
        "inside jit, vmap or grad",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_name_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint: the folder .* cannot be made"):
        solve(checkpoint=tmp_path / "file" / "inside")


@pytest.mark.parametrize(
    "value",
    ["text", None, [1.0, 2.0], {"a": 1.0}, object(), np.array("text")],
    ids=["text", "none", "list", "dict", "object", "array-of-text"],
)
def test_what_record_may_not_return(value, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"record\(x, y\) must return a dictionary"):
        solve(record=lambda x, y: {"loss": value})


def test_stop_none_is_no_stop(monkeypatch):
    monkeypatch.undo()
    assert solve(stop=None).result is aipod.Result.completed
