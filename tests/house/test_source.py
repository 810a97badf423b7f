"""What the source of aipod must not contain."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import aipod

ROOT = Path(aipod.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Whatever forms a Hessian, a Jacobian, a basis of a null space or an inverse.
DENSE = {
    "cholesky",
    "cho_factor",
    "cho_solve",
    "eig",
    "eigh",
    "hessian",
    "inv",
    "jacfwd",
    "jacobian",
    "jacrev",
    "lstsq",
    "lu",
    "lu_factor",
    "matrix_power",
    "null_space",
    "orth",
    "pinv",
    "qr",
    "solve",
    "svd",
}
MODULES = ("jax", "jnp", "np", "numpy", "scipy", "jsp", "linalg", "lx", "lineax")

# `Direct` is dense by design, and `DenseMap` is factored once, when a set is made.
ALLOWED = {
    ("slots/adjoint/_direct.py", "Direct.solve"),
    ("sets/_linear.py", "DenseMap.__init__"),
    # As many rows as the equalities of a set with bounds, whose free entries change.
    ("sets/_dense_rows.py", "_inverse"),
    ("sets/_dense_rows.py", "_damped_solve"),
    # The random matrices of an experiment, made once.
    ("experiments/tasks/synthetic.py", "orthonormal_rows"),
    # A regression on the data of an experiment, made once.
    ("experiments/tasks/portfolio.py", "market"),
}


def dotted(node: ast.expr) -> str:
    """`jnp.linalg.solve` as it is written; empty for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def dense_uses(source: str) -> Iterator[tuple[str, str]]:
    """(the function around it, the name) for every dense operation that is used or imported."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        where = ".".join(scope)
        if isinstance(node, ast.ImportFrom):
            root = (node.module or "").split(".")[0]
            yield from (
                (where, f"{node.module}.{name.name}")
                for name in node.names
                if root in MODULES and (name.name in DENSE or name.name == "linalg")
            )
        if isinstance(node, ast.Attribute) and node.attr in DENSE:
            name = dotted(node)
            if name.split(".")[0] in MODULES:
                yield where, name
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = (*scope, node.name)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    return visit(ast.parse(source), ())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_dense_algebra_stays_in_direct_and_in_the_one_factorisation():
    found = {
        (relative(path), where, name)
        for path in FILES
        for where, name in dense_uses(path.read_text())
    }
    allowed = {use for use in found if (use[0], ".".join(use[1].split(".")[:2])) in ALLOWED}
    assert found - allowed == set()
    # The search does find things: these are the uses it is meant to allow.
    assert {"jax.hessian", "jnp.linalg.solve", "scipy.linalg.svd"} <= {use[2] for use in allowed}


@pytest.mark.parametrize(
    "source",
    [
        "def f(g, y):\n    return jax.hessian(g)(y)",
        "class A:\n    def f(self, a):\n        return jnp.linalg.inv(a)",
        "step = lambda a: scipy.linalg.null_space(a)",
        "from jax import jacfwd",
        "from jax.numpy.linalg import solve",
        "from numpy import linalg",
    ],
)
def test_the_search_for_dense_algebra_finds_it(source):
    assert len(list(dense_uses(source))) == 1


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_source_is_safe_and_never_asserts(path):
    tree = ast.parse(path.read_text())
    # Reading a pickle runs whatever its author wrote.
    assert not {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"} & set(
        imports(tree)
    )
    for node in ast.walk(tree):
        # `python -O` drops assertions, and their message names no remedy.
        assert not isinstance(node, ast.Assert), f"assert in line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert getattr(node.value, "value", None) is False, "allow_pickle must be False"
        if isinstance(node, ast.Call) and dotted(node.func) in {"eval", "exec"}:
            pytest.fail(f"{dotted(node.func)} in line {node.lineno}")


def test_there_is_source_to_search():
    assert {"slots/_turn.py", "problem/_bilevel.py", "sets/_linear.py"} <= {
        relative(f) for f in FILES
    }
