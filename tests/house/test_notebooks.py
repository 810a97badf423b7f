"""The notebooks are those of their pages, and run from top to bottom."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

plt = pytest.importorskip("matplotlib.pyplot")
plt.switch_backend("Agg")
DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
_SPEC = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
notebooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(notebooks)


def test_they_are_made_from_the_pages():
    wanted = notebooks.made()
    assert len(wanted) >= 9
    assert {path.name for path in wanted} == {path.name for path in NOTEBOOKS}, "make notebooks"
    stale = [path.name for path, text in wanted.items() if path.read_text() != text]
    assert not stale, "make notebooks"


def test_a_page_becomes_cells():
    page = "# Title\n\nSee [`solve`][aipod.solve] and [it](../x.md).\n\n"
    page += "```python\na = 1\nb = 2\n```\n\n```bash\naipod list\n```\n"
    first, code, last = notebooks.cells(page)
    assert "".join(first["source"]) == "# Title\n\nSee `solve` and it."
    assert (code["cell_type"], code["source"]) == ("code", ["a = 1\n", "b = 2"])
    assert last["cell_type"] == "markdown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, capsys, tmp_path, monkeypatch):
    """All cells, one after the other; what a cell ends with is shown, as a notebook does."""
    monkeypatch.chdir(tmp_path)  # some write files
    names = {"__name__": "__main__"}
    with jax.enable_x64(False):
        for number, cell in enumerate(json.loads(path.read_text())["cells"], 1):
            if cell["cell_type"] == "code":
                code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
                exec(code, names)
    plt.close("all")
    if "solution" in names:
        assert ">result" in names["solution"]._repr_html_()
    assert "nan" not in capsys.readouterr().out
