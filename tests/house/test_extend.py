"""Algorithms of one's own: the tutorial does what it says, and types outside the package fit."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from tests.house import typed_extension

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TREES = [ast.parse(block) for block in BLOCKS]
TYPED = Path(typed_extension.__file__)


@pytest.mark.parametrize(
    "tree", [*TREES, ast.parse(TYPED.read_text())], ids=[*range(len(TREES)), "typed"]
)
def test_public_names_are_enough(tree):
    modules, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    allowed = {"aipod", "aipod.stepsize", "jax", "jax.numpy", "equinox", "optax", "jaxtyping"}
    assert modules <= allowed | {"dataclasses", "typing"}
    # `_replace` is the public method of a named tuple.
    assert {name for name in names if name.startswith("_")} <= {"_replace"}


def test_the_tutorial_does_what_it_says(capsys):
    """Its blocks one after the other in single precision, then the numbers that its text gives."""
    page = {"__name__": "__main__"}
    with jax.enable_x64(False):
        for number, block in enumerate(BLOCKS, 1):
            exec(compile(block, f"docs/extend.md, block {number}", "exec"), page)
        plain = float(page["variance"](page["products"]))
        saga = float(page["variance"](page["products"] - page["table"]))
        far = float(jnp.linalg.norm(page["z"] - page["wanted"]))
        gradient = [
            float(aipod.stationarity(page["own_problem"], x, page["y0"]))
            for x in (page["x0"], page["solution"].x)
        ]
        local = float(aipod.stationarity(page["federation"], page["run"].x, page["start"]))
    printed = capsys.readouterr().out
    assert "nan" not in printed
    # Momentum; without it, AiPOD.
    assert "0.0 0.032" in printed
    assert "0.5 0.0010" in printed
    assert bool(jnp.all(page["ours"].x == page["theirs"].x))
    # SAGA: the variance vanishes where that of a plain step stays.
    assert far < 1e-6
    assert plain == pytest.approx(0.17, abs=0.01)
    assert saga < 1e-14
    # The set.
    for name, wrong in page["errors"].items():
        assert float(jnp.max(jnp.abs(wrong))) < 1e-6, name
    # All of it together, and in a federation.
    assert gradient[0] == pytest.approx(0.012, abs=0.001)
    assert gradient[1] < 2e-5
    assert "7200" in printed
    assert page["run"].ledger.rounds == 800
    assert local < 1e-9
    assert bool(jnp.all(page["run"].x == page["known"].x))
    # The sentence, as the page quotes it.
    (quoted,) = re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
    assert quoted in printed


def classes():
    """The classes of the page, without running the rest of it."""
    kept = [
        node
        for tree in TREES
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)
    ]
    names = {}
    exec(compile(ast.Module(kept, []), "docs/extend.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def federation():
    key = jax.random.split(jax.random.key(1), 2)
    data = (
        jax.random.normal(key[0], (3, 5, 3)),
        jnp.exp(0.3 * jax.random.normal(key[1], (3, 5, 3))),
    )

    def lower(x, y, batch):
        return 0.5 * jnp.mean(jnp.sum(batch[1] * ((y - x)[None] - batch[0]) ** 2, axis=1))

    def upper(x, y, batch):
        return jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2)

    problem = aipod.federated.federate(upper, lower, data, data, batch_size=2)
    start = aipod.federated.replicate(jnp.zeros(3), 3)
    return problem, start, start


@pytest.mark.parametrize("name", ["HeavyBall", "LocalStep"])
def test_the_slots_of_the_page_do_on_flower_what_they_do_in_the_simulation(
    name, federation, tmp_path
):
    pytest.importorskip("flwr")
    from tests.flower.test_flower import SEED, serve

    own = classes()
    if name == "HeavyBall":
        solver = aipod.Alternating(own[name](steps=2), aipod.Neumann(2), own["Clipped"]())
    else:
        adjoint = aipod.OneRoundAdjoint(steps=1, lr=0.1)
        solver = aipod.Alternating(own[name](), adjoint, aipod.EveryStep(lr=0.02))

    def record(x, y):
        return {"x": aipod.federated.average(x)[0], "y": aipod.federated.average(y)[0]}

    key = jax.random.key(SEED)
    simulated = aipod.solve(federation[0], solver, *federation[1:], 3, key=key, record=record)
    _, columns, words, error = serve(
        federation, solver, tmp_path, {"outer-steps": 3, "every": 3}, record=record
    )
    assert error is None
    for part in ("x", "y"):
        found, wanted = columns[f"history:{part}"][-1], simulated.history[part][-1]
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert words["progress"]["rounds"] == simulated.ledger.rounds


@pytest.mark.parametrize("name", typed_extension.solvers)
def test_the_typed_file_solves_its_problem(name):
    assert typed_extension.stationarity(name, 1) > 0.01
    assert typed_extension.stationarity(name, 400) < 1e-3


def test_a_slot_alone():
    z, projections = typed_extension.adjoint_alone()
    start = jnp.zeros(4)
    exact = typed_extension.problem.expected()
    turn = aipod.Turn(exact, start, start, typed_extension.RATES, jax.random.key(0))
    wanted, _, _ = aipod.Direct().solve(turn, None, None)
    assert projections == 200
    np.testing.assert_allclose(z, wanted, atol=1e-8)


WRONG = """
from typing import Any

import aipod


class Forgetful(aipod.AbstractLower):
    lr: float = 0.1

    def run(self, turn: aipod.Turn, state: Any) -> tuple[Any, Any]:
        return turn.y, state


class Mistaken(aipod.AbstractSet):
    def project(self, y: Any) -> Any:
        return y


aipod.Alternating(aipod.Neumann(), aipod.ProxSkip(), aipod.EveryStep(lr=0.1))
aipod.Turn.lower_gradients
"""

# x and y have the types of x0 and y0.
GENERIC = """
from typing import NamedTuple

import jax
import jax.numpy as jnp

import aipod


class Parameters(NamedTuple):
    weight: jax.Array


def best(problem: aipod.Bilevel) -> aipod.Solution[jax.Array, Parameters]:
    start = Parameters(jnp.zeros(3))
    return aipod.solve(problem, aipod.AiPOD(), jnp.zeros(3), start, 5, key=jax.random.key(0))


def shown(solution: aipod.Solution) -> str:
    return str(solution.x)


def weight_of(problem: aipod.Bilevel) -> jax.Array:
    return best(problem).y.weight
"""
WRONG_TYPE = """

def bias_of(problem: aipod.Bilevel) -> jax.Array:
    return best(problem).feasible()[1].bias
"""


# mypy reads JAX, which takes long; nothing else shows that the types are of use outside.
@pytest.mark.slow
def test_types_hold_outside_the_package(tmp_path):
    """As with an installed aipod: what mypy finds in the package itself is not the user's."""
    (tmp_path / "right.py").write_text(TYPED.read_text())
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right_generic.py").write_text(GENERIC)
    (tmp_path / "wrong_generic.py").write_text(GENERIC + WRONG_TYPE)
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            *("right.py", "wrong.py", "right_generic.py", "wrong_generic.py"),
        ],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = found.stdout.splitlines()
    assert [line for line in lines if line.startswith("right")] == [], found.stdout
    wrong = "\n".join(line for line in lines if line.startswith("wrong"))
    for complaint in (
        'Return type "tuple[Any, Any]" of "run" incompatible',
        'Signature of "project" incompatible',
        'Argument 1 to "Alternating" has incompatible type "Neumann"; expected "AbstractLower"',
        'has no attribute "lower_gradients"',
        '"Parameters" has no attribute "bias"',
    ):
        assert complaint in wrong, found.stdout + found.stderr
