"""Odd arguments, hundreds of them: each gets one sentence, or is meant to be accepted.

Sets, the command and Flower have tables of their own beside their tests.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated

KEY = jax.random.key(0)
X = jnp.zeros(3)
PROBLEM = aipod.Bilevel(
    lambda x, y, _: jnp.sum((y - 1.0) ** 2), lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2)
)
SOLVER = aipod.AiPOD(upper_lr=0.1, lower_lr=0.5)
NAN, INF = float("nan"), float("inf")

NUMBERS = {
    "text": "0.1",
    "none": None,
    "nan": NAN,
    "infinite": INF,
    "negative": -0.1,
    "zero": 0.0,
    "array": np.ones(2),
    "list": [0.1],
    "complex": 1j,
    "bool": True,
    "bytes": b"1",
    "numpy-negative": np.float32(-1),
}
# What takes a number, and which of the odd ones it takes as well.
TAKES_A_NUMBER = {
    "upper_lr": (lambda v: aipod.AiPOD(upper_lr=v), ("none",)),
    "lower_lr": (lambda v: aipod.AiPOD(upper_lr=0.1, lower_lr=v), ()),
    # E-AiPOD with the lower level of E3-AiPOD, an older way to say it.
    "lower_prob": (lambda v: aipod.EAiPOD(upper_lr=0.1, lower_prob=v), ("none",)),
    "adjoint_prob": (lambda v: aipod.E2AiPOD(upper_lr=0.1, adjoint_prob=v), ()),
    "extrapolation": (lambda v: aipod.EAiPOD(upper_lr=0.1, extrapolation=v), ()),
    "neumann-damping": (lambda v: aipod.Neumann(damping=v), ("zero",)),
    "e3-damping": (lambda v: aipod.E3AiPOD(damping=v), ("zero", "none")),
    "safety": (lambda v: aipod.Curvature(safety=v), ()),
    "cap": (lambda v: aipod.Curvature(cap=v), ("none",)),
    "rtol": (lambda v: aipod.ConjugateGradient(rtol=v), ("zero",)),
    "noise": (lambda v: aipod.Noise(v), ("zero",)),
    "growth": (lambda v: aipod.BSA(upper_lr=0.1, growth=v), ()),
    "decay": (lambda v: aipod.BSA(upper_lr=0.1, decay=v), ("zero",)),
    "penalty": (lambda v: aipod.IGAL(upper_lr=0.1, penalty=v), ()),
    "tolerance": (lambda v: aipod.IGAL(upper_lr=0.1, tolerance=v), ()),
    "perturbation": (lambda v: aipod.FirstOrderPenalty(upper_lr=0.1, perturbation=v), ()),
    "fading-lr": (lambda v: aipod.fading_adam(v), ()),
    "fade": (lambda v: aipod.fading_adam(0.1, v), ()),
    "dirichlet": (lambda v: federated.Dirichlet(v), ()),
    "share": (lambda v: federated.split([np.arange(4)], v, key=KEY), ()),
    "participation": (lambda v: aipod.Consensus(participation=v), ()),
}
WHOLE = {
    "text": "3",
    "none": None,
    "float": 2.5,
    "zero": 0,
    "negative": -1,
    "bool": True,
    "nan": NAN,
    "array": np.array([3]),
    "large": 2**40,
}
TAKES_A_WHOLE_NUMBER = {
    "lower_steps": (lambda v: aipod.AiPOD(upper_lr=0.1, lower_steps=v), ()),
    "adjoint_steps": (lambda v: aipod.AiPOD(upper_lr=0.1, adjoint_steps=v), ("none",)),
    "upper_steps": (lambda v: aipod.EAiPOD(upper_lr=0.1, upper_steps=v), ()),
    "lower_episodes": (lambda v: aipod.FedNest(upper_lr=0.1, lower_episodes=v), ()),
    "batch": (lambda v: aipod.StocBiO(upper_lr=0.1, batch=v), ()),
    "iterations": (lambda v: aipod.Curvature(iterations=v), ()),
    # With replacement a batch may be larger than the data.
    "batch_size": (lambda v: aipod.Minibatches(np.ones((5, 2)), v), ("large",)),
    "cg-max_steps": (lambda v: aipod.ConjugateGradient(max_steps=v), ("none",)),
    "newton-max_steps": (lambda v: aipod.exact_lower(PROBLEM, X, X, max_steps=v), ()),
    "shards": (lambda v: federated.Shards(v), ()),
    "clients": (lambda v: federated.partition(np.zeros(100), v, key=KEY), ()),
    "replicate": (lambda v: federated.replicate(X, v if v != 2**40 else 0), ()),
    "theory": (lambda v: aipod.stepsize.theory(v, "thm"), ()),
    "rule": (lambda v: aipod.stepsize.rule("alset", v), ()),
    "steps": (lambda v: aipod.solve(PROBLEM, SOLVER, X, X, v, key=KEY), ()),
    "every": (lambda v: aipod.solve(PROBLEM, SOLVER, X, X, 2, key=KEY, every=v), ()),
}
DATA = {
    "text": "abc",
    "strings": np.array(["a", "b"]),
    "objects": np.array([object()]),
    "none": None,
    "scalar": 3.0,
    "empty": np.zeros((0, 2)),
    "nan": np.array([NAN]),
    "ragged": [np.ones(2), np.ones(3)],
    "dict": {},
    "complex": np.ones(3) * 1j,
    "list": [1.0, 2.0],
    "bool": np.array([True, False]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
}
TAKES_DATA = {
    # Deterministic data may have any shapes.
    "full-batch": (aipod.FullBatch, ("scalar", "ragged", "complex", "list", "bool")),
    "minibatches": (lambda v: aipod.Minibatches(v, 2), ("complex", "bool")),
    "client-minibatches": (lambda v: aipod.ClientMinibatches(v, 2), ()),
    # A list is one entry for each client.
    "federate": (
        lambda v: federated.federate(PROBLEM.upper, PROBLEM.lower, v, v, batch_size=2),
        ("ragged",),
    ),
    "x": (lambda v: aipod.hypergradient(PROBLEM, v, X), ("scalar",)),
    "y": (lambda v: aipod.hypergradient(PROBLEM, X, v), ("scalar",)),
    "x0": (lambda v: SOLVER.init(PROBLEM, v, X), ("scalar",)),
    "y0": (lambda v: SOLVER.init(PROBLEM, X, v), ("scalar",)),
    "average": (federated.average, ("empty", "nan", "ragged", "complex", "bool")),
}
KEYS = {
    "none": None,
    "number": 0,
    "text": "k",
    "several": jax.random.split(KEY),
    "floats": jnp.zeros(2),
    "words": np.zeros(2, np.uint32),
}
TAKES_A_KEY = {
    "solve": (lambda v: aipod.solve(PROBLEM, SOLVER, X, X, 2, key=v), ()),
    "check": (lambda v: aipod.check(PROBLEM, X, X, key=v), ()),
    "hypergradient": (lambda v: aipod.hypergradient(PROBLEM, X, X, key=v), ("none",)),
    "partition": (lambda v: federated.partition(np.zeros(9), 3, key=v), ()),
    "split": (lambda v: federated.split([np.arange(4)], 0.5, key=v), ()),
    # Inside jit an array of NumPy is one of JAX.
    "step": (lambda v: SOLVER.step(PROBLEM, SOLVER.init(PROBLEM, X, X), key=v), ("words",)),
}
THINGS = {
    "none": None,
    "text": "f",
    "number": 3,
    "class": object,
    "two-arguments": lambda x, y: 0.0,
    "vector": lambda x, y, batch: y,
    "nothing": lambda x, y, batch: None,
    "tuple": lambda x, y, batch: (jnp.sum(y), 1),
    "whole": lambda x, y, batch: jnp.sum(y.astype(int)),
    "complex": lambda x, y, batch: jnp.sum(y * 1j),
    "raises": lambda x, y, batch: 1 / 0,
}


def upper(v):
    return SOLVER.init(aipod.Bilevel(v, PROBLEM.lower), X, X)


def lower(v):
    return SOLVER.init(aipod.Bilevel(PROBLEM.upper, v), X, X)


def samples(v):
    return SOLVER.init(aipod.Bilevel(PROBLEM.upper, PROBLEM.lower, upper_samples=v), X, X)


def solved(**more):
    return aipod.solve(PROBLEM, SOLVER, X, X, 2, key=KEY, **more)


TAKES_A_THING = {
    "upper": (upper, ()),
    "lower": (lower, ()),
    "samples": (samples, ("none",)),
    "lower_set": (lambda v: aipod.Bilevel(PROBLEM.upper, PROBLEM.lower, lower_set=v), ()),
    "optimizer": (lambda v: aipod.AiPOD(upper_optimizer=v), ("none",)),
    "record": (lambda v: solved(record=v), ("none", "two-arguments")),
    "progress": (lambda v: solved(progress=v), ()),
    "stop": (lambda v: solved(stop=v), ("none",)),
    "adjoint": (lambda v: aipod.hypergradient(PROBLEM, X, X, adjoint=v), ()),
    "solver": (lambda v: aipod.solve(PROBLEM, v, X, X, 2, key=KEY), ()),
    "problem": (lambda v: aipod.solve(v, SOLVER, X, X, 2, key=KEY), ()),
    "scheme": (lambda v: federated.partition(np.zeros(9), 3, v, key=KEY), ()),
    "scope": (
        lambda v: aipod.Alternating(SOLVER.lower, SOLVER.adjoint, SOLVER.upper, scope=v),
        ("none",),
    ),
    "stationarity": (lambda v: aipod.stationarity(v, X), ()),
}
SCHEDULES = {
    "text": lambda step: "a",
    "none": lambda step: None,
    "vector": lambda step: jnp.ones(2),
    "negative": lambda step: -0.1,
    "two-arguments": lambda step, more: 0.1,
    "raises": lambda step: 1 / 0,
}
TAKES_A_SCHEDULE = {
    "upper_lr": (lambda v: aipod.AiPOD(upper_lr=v), ("none",)),
    "lower_lr": (lambda v: aipod.AiPOD(upper_lr=0.1, lower_lr=v), ()),
    "adjoint_lr": (lambda v: aipod.AiPOD(upper_lr=0.1, adjoint_lr=v), ()),
}
TABLES = [
    (TAKES_A_NUMBER, NUMBERS),
    (TAKES_A_WHOLE_NUMBER, WHOLE),
    (TAKES_DATA, DATA),
    (TAKES_A_KEY, KEYS),
    (TAKES_A_THING, THINGS),
    (TAKES_A_SCHEDULE, SCHEDULES),
]
ROWS = [
    pytest.param(call, values, accepted, id=name)
    for table, values in TABLES
    for name, (call, accepted) in table.items()
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """A run that starts was not refused in time."""

    def started(*args):
        raise AssertionError("the input was not checked before compiling")

    monkeypatch.setattr("aipod.solving._run.Program", started)


@pytest.mark.parametrize(("call", "values", "accepted"), ROWS)
def test_odd_arguments_get_a_sentence(call, values, accepted):
    raw = {}
    for name, value in values.items():
        if name in accepted:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(value)
            raw[name] = "accepted"
        except ValueError as error:
            if len(str(error)) < 20:
                raw[name] = f"a message that says nothing: {error}"
        except Exception as error:
            raw[name] = f"{type(error).__name__}: {error}"
    assert raw == {}


def test_the_table_is_as_long_as_it_says():
    assert sum(len(values) * len(table) for table, values in TABLES) > 600
