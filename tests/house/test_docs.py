"""The documents keep their word: their code runs, and every public name is explained by example."""

import importlib.util
import inspect
import re
import textwrap
import warnings
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aipod
from tests.report.test_report import browser  # noqa: F401, a fixture

with warnings.catch_warnings():
    # flwr imports typer, which warns of what its click is going to drop.
    warnings.simplefilter("ignore")
    import aipod.flower

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    str(path.relative_to(DOCS)): BLOCK.findall(path.read_text())
    for path in sorted(DOCS.rglob("*.md"))
}
# The README's code runs in test_examples.py, in a process of its own; that of extend.md in
# test_extend.py, where its numbers are looked at too; that of the guides in test_notebooks.py.
WITH_CODE = [
    name
    for name, blocks in PAGES.items()
    if blocks and name != "extend.md" and not name.startswith("guides/")
]


def public():
    """Every public name with its full path; what a module merely imports is not its own."""
    for module in (aipod, aipod.callbacks, aipod.federated, aipod.data, aipod.flower):
        for name, value in vars(module).items():
            home = getattr(value, "__module__", None) or ""
            if name.startswith("_") or isinstance(value, ModuleType) or "aipod" not in home:
                continue
            # A single file has no names of others to offer.
            if not hasattr(module, "__path__") and home != module.__name__:
                continue
            yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, capsys, tmp_path, monkeypatch):
    """All blocks of a page, one after the other, in single precision as a newcomer has it."""
    monkeypatch.chdir(tmp_path)  # some write files
    names = {"__name__": "__main__"}
    with jax.enable_x64(False):
        for number, block in enumerate(PAGES[page], 1):
            exec(compile(block, f"docs/{page}, block {number}", "exec"), names)
    assert "nan" not in capsys.readouterr().out


TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_the_documents_name_are_there(text):
    roots = "aipod|tests|examples|benchmarks|docs"
    named = re.findall(rf"`((?:{roots})/[\w./*-]*)`", text.read_text())
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_the_readme_lists_every_room():
    layout = (ROOT / "README.md").read_text().partition("## Layout")[2]
    rooms = {path.name for path in (ROOT / "aipod").iterdir() if path.is_dir()} - {"__pycache__"}
    assert {room for room in rooms if f"`aipod/{room}`" not in layout} == set()


def test_there_is_code_to_run():
    assert {"index.md", "get-started.md", "federated.md", "e3-aipod.md"} <= set(WITH_CODE)


def test_the_front_page_shows_it_in_twenty_lines():
    (code,) = PAGES["index.md"]
    body = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(body) <= 20


def loss(x, y, batch):
    return jnp.mean((batch[0] @ y - batch[1]) ** 2) + jnp.sum((y - x) ** 2)


@pytest.fixture(scope="module")
def surroundings():
    """What the examples of docstrings take for granted, by the names that they use."""
    key, zeros = jax.random.key(0), jnp.zeros(3)
    inputs, targets = jax.random.normal(key, (40, 3)), jnp.ones(40)
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
        lower_set=aipod.Affine(jnp.ones((1, 3)), 1.0),
    )
    solver = aipod.AiPOD(upper_lr=0.1)
    return {
        **{"aipod": aipod, "jax": jax, "jnp": jnp, "optax": optax, "Start": aipod.flower.Start},
        **{"problem": problem, "x0": zeros, "y0": zeros, "x": zeros, "y": zeros, "key": key},
        **{"solver": solver, "lower": solver.lower, "adjoint": solver.adjoint},
        **{
            "upper": solver.upper,
            "solution": aipod.solve(problem, solver, zeros, zeros, 9, key=key),
        },
        **{"inputs": inputs, "targets": targets, "f": loss, "g": loss},
        **{"val": (inputs, targets), "train": (inputs, targets)},
        **{"images": np.zeros((200, 2)), "labels": np.arange(200) % 4},
        **{"parts": [np.arange(5), np.arange(5, 9)], "load_client": lambda context: None},
    }


def clients(surroundings):
    """The same names with two clients in the data and in the problem."""
    data = (jnp.ones((2, 5, 3)), jnp.ones((2, 5)))
    problem = aipod.federated.federate(loss, loss, data, data, batch_size=None)
    points = dict.fromkeys(("x0", "y0"), jnp.zeros((2, 3)))
    own = {"problem": problem, "inputs": data[0], "labels": data[1], "val": data, "train": data}
    return surroundings | points | own


FOR_CLIENTS = ("aipod.ClientMinibatches", "aipod.federated.federate", "aipod.flower.client_of")
# The first two have no folder to read; the last is on the page verify.md, and takes long.
NOT_RUN = ("aipod.data.mnist", "aipod.flower.load", "aipod.check")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name, surroundings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    text = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    assert len(text.splitlines()[0]) > 15, "begin with a plain sentence"
    found = re.search(r"!!! example\n    ```python\n(.*?)\n    ```", text, re.DOTALL)
    assert found, "end the docstring with an `!!! example` block"
    assert name.rpartition(".")[2] in found[1] or name in INDIRECT, "show the name at work"
    code = compile(textwrap.dedent(found[1]), f"the example of {name}", "exec")
    if name not in NOT_RUN:
        exec(code, clients(surroundings) if name in FOR_CLIENTS else dict(surroundings))


# Shown by what gives them.
INDIRECT = (
    *("aipod.State", "aipod.Result", "aipod.Solution", "aipod.History", "aipod.Ledger"),
    "aipod.SavedSolution",
    *("aipod.data.Split", "aipod.data.Dataset"),
)


def test_the_reference_has_every_public_name_once():
    listed = [
        name.replace("hypergradient.hypergradient", "hypergradient").replace("solve.solve", "solve")
        for page in sorted((DOCS / "reference").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    assert set(PUBLIC) - set(listed) == set()


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_reference_shows_the_keywords_of_variants(hooks):
    variants = {n: f for n, f in vars(aipod).items() if hasattr(f, "__signature__")}
    variants = {n: f for n, f in variants.items() if hasattr(f, "__wrapped__")}
    assert {"ALSET", "BSA", "StocBiO", "TTSA", "LFedNest", "FirstOrderPenalty"} <= set(variants)
    inside = {name: function.__wrapped__ for name, function in variants.items()}
    try:
        hooks.on_startup()
        for name, function in variants.items():
            # This is how mkdocstrings looks at a function.
            shown = inspect.signature(inspect.unwrap(function)).parameters
            assert "upper_lr" in shown, name
            assert "arguments" not in shown, name
    finally:
        for name, function in variants.items():
            function.__wrapped__ = inside[name]


def test_the_labels_that_docstrings_cite_stand_on_the_page_of_the_mathematics(hooks):
    page = (DOCS / hooks.MATHEMATICS).read_text()
    sources = "".join(path.read_text() for path in (ROOT / "aipod").rglob("*.py"))
    assert [label for label in hooks.LABELS if f"`{label}`" not in page] == []
    cited = [label for label in hooks.LABELS if re.search(f'`"?{re.escape(label)}"?`', sources)]
    assert [label for label in hooks.LABELS if label not in cited] == []


def test_the_site_is_searched_without_a_server_and_asks_no_other_host(browser):  # noqa: F811
    site = ROOT / "site" / "index.html"
    if not site.exists():
        pytest.skip("the documentation is not built: make docs")
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(site.as_uri())
    page.focus(".md-search__input")
    page.keyboard.type("ProxSkip")
    page.wait_for_selector(".md-search-result__item", timeout=30_000)
    assert page.locator(".md-search-result__item").count() > 1
    page.goto((site.parent / "mathematics.html").as_uri())
    assert page.locator("math").count() > 50
    assert page.locator("math").first.bounding_box()["width"] > 20
    assert [url for url in asked if url.startswith("http")] == []
    page.close()
