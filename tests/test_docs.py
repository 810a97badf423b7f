"""The documents keep their word: their code runs, and every public name is explained by example."""

import ast
import importlib.util
import inspect
import re
import textwrap
import warnings
from pathlib import Path
from types import ModuleType

import jax
import pytest

import aipod

with warnings.catch_warnings():
    # flwr imports typer, which warns of what its click is going to drop.
    warnings.simplefilter("ignore")
    import aipod.flower

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    str(path.relative_to(DOCS)): BLOCK.findall(path.read_text())
    for path in sorted(DOCS.rglob("*.md"))
}
# The README's code runs in test_examples.py, in a process of its own.
WITH_CODE = [name for name, blocks in PAGES.items() if blocks]


def public():
    """Every public name with its full path; what a module merely imports is not its own."""
    for module in (aipod, aipod.federated, aipod.data, aipod.flower):
        for name, value in vars(module).items():
            home = getattr(value, "__module__", None) or ""
            if name.startswith("_") or isinstance(value, ModuleType) or "aipod" not in home:
                continue
            yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, capsys):
    """All blocks of a page, one after the other, in single precision as a newcomer has it."""
    names = {"__name__": "__main__"}
    with jax.enable_x64(False):
        for number, block in enumerate(PAGES[page], 1):
            exec(compile(block, f"docs/{page}, block {number}", "exec"), names)
    assert "nan" not in capsys.readouterr().out


def test_there_is_code_to_run():
    assert {"index.md", "get-started.md", "federated.md", "e3-aipod.md"} <= set(WITH_CODE)


def test_the_front_page_shows_it_in_twenty_lines():
    (code,) = PAGES["index.md"]
    body = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(body) <= 20


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    text = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    assert len(text.splitlines()[0]) > 15, "begin with a plain sentence"
    found = re.search(r"!!! example\n    ```python\n(.*?)\n    ```", text, re.DOTALL)
    assert found, "end the docstring with an `!!! example` block"
    ast.parse(textwrap.dedent(found[1]))


def test_the_reference_has_every_public_name_once():
    listed = [
        name.replace("hypergradient.hypergradient", "hypergradient").replace("solve.solve", "solve")
        for page in sorted((DOCS / "reference").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    assert set(PUBLIC) - set(listed) == set()


def test_the_labels_that_docstrings_cite_stand_on_the_page_of_the_mathematics():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (DOCS / hooks.MATHEMATICS).read_text()
    sources = "".join(path.read_text() for path in (ROOT / "aipod").rglob("*.py"))
    assert [label for label in hooks.LABELS if f"`{label}`" not in page] == []
    cited = [label for label in hooks.LABELS if re.search(f'`"?{re.escape(label)}"?`', sources)]
    assert [label for label in hooks.LABELS if label not in cited] == []
