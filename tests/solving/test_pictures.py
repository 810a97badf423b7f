"""What a solution shows of itself, and what a file keeps of it."""

import sys
from types import ModuleType, SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.solving._progress import Progress, front_for

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
KEY = jax.random.key(0)


class Net(eqx.Module):
    weight: jax.Array


def solve(x0=None, record=True, **options):
    x0 = jnp.zeros(3) if x0 is None else x0

    def half(x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x))

    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * half(x) ** 2,
        lower=lambda x, y, _: 0.5 * jnp.sum((y - half(x)) ** 2),
    )
    recorded = {"record": lambda x, y: {"loss": jnp.sum(y**2) + 1e-9, "pair": y[:2]}}
    return aipod.solve(
        problem,
        aipod.AiPOD(upper_lr=0.05, lower_lr=0.5, adjoint_lr=1.0, adjoint_steps=1),
        x0,
        jnp.zeros(3),
        20,
        key=KEY,
        every=5,
        **(recorded if record else {}),
        **options,
    )


@pytest.fixture(scope="module")
def solution():
    return solve()


@pytest.mark.parametrize("against", ["step", "steps", "projections", "samples", "seconds"])
def test_a_figure_against_each_cost(solution, against):
    figure = solution.plot(against)
    left, right = figure.axes
    (line,) = left.lines
    assert len(right.lines) == 2  # an array of two
    np.testing.assert_array_equal(line.get_ydata(), solution.history["loss"])
    if against.startswith("step"):
        np.testing.assert_array_equal(line.get_xdata(), [5, 10, 15, 20])
    matplotlib.pyplot.close(figure)


def test_metrics_are_chosen_and_odd_wishes_refused(solution):
    figure = solution.plot(metrics="loss")
    assert [place.get_title() for place in figure.axes] == ["loss"]
    matplotlib.pyplot.close("all")
    with pytest.raises(KeyError, match="no column 'los'"):
        solution.plot(metrics=["los"])
    with pytest.raises(ValueError, match="against must be one of step"):
        solution.plot("epochs")
    with pytest.raises(ValueError, match="counted in a federation"):
        solution.plot("rounds")
    matplotlib.pyplot.close("all")


def test_a_solution_without_a_record_still_has_a_picture():
    figure = solve(record=False).plot()
    assert len(figure.axes) == 1
    matplotlib.pyplot.close(figure)


def test_a_notebook_shows_table_and_figure(solution, monkeypatch):
    html = solution._repr_html_()
    assert ">result" in html
    assert "data:image/png;base64," in html
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<img" not in solution._repr_html_()


TREES = {
    "array": jnp.arange(3.0),
    "nested": {"w": jnp.arange(3.0), "b": [jnp.ones(()), (jnp.zeros(2), None)]},
    "half": {"w": jnp.arange(3.0).astype(jnp.bfloat16)},
}


@pytest.mark.parametrize("name", TREES)
def test_a_file_gives_everything_back(name, tmp_path):
    found = solve(TREES[name])
    path = found.save(tmp_path / "deep.er")
    assert path.name == "deep.er.npz"
    again = aipod.load(path)
    assert jax.tree.structure(again.x) == jax.tree.structure(found.x)
    for left, right in zip(jax.tree.leaves(again.x), jax.tree.leaves(found.x), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(again.y, found.y)
    assert dict(again.history).keys() == dict(found.history).keys()
    np.testing.assert_array_equal(again.history["pair"], found.history["pair"])
    assert again.ledger == found.ledger
    assert again.convergence == found.convergence
    assert (again.result, str(again)) == (found.result, str(found))
    assert "<img" in again._repr_html_()
    assert aipod.load(again.save(tmp_path / "again")).ledger == found.ledger
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.npz", "deep.er.npz"]


def test_a_module_needs_its_structure(tmp_path):
    start = Net(jnp.arange(3.0))
    found = solve(start)
    path = found.save(tmp_path / "net.npz")
    assert set(aipod.load(path).x) == {".weight"}
    again = aipod.load(path, x0=start)
    assert isinstance(again.x, Net)
    np.testing.assert_array_equal(again.x.weight, found.x.weight)
    with pytest.raises(ValueError, match="x0 has"):
        aipod.load(path, x0=jnp.zeros(3))


def test_files_that_are_no_solution(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        aipod.load(tmp_path / "none.npz")
    for name, content in (("text", b"hello"), ("zip", b"PK\x05\x06" + bytes(18))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="is no saved solution"):
            aipod.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="is no saved solution"):
        aipod.load(tmp_path / "other.npz")


def test_the_page_of_solutions(solution, tmp_path):
    page = aipod.report(solution, tmp_path / "one.html", title="<mine>", about="three numbers")
    text = page.read_text()
    assert "aipod: &lt;mine&gt;" in text
    assert "Three numbers." in text
    assert "<h3>Convergence</h3>" in text
    saved = aipod.load(solution.save(tmp_path / "s"))
    both = aipod.report({"mine": [solution, solution], "saved": saved}, tmp_path / "two.html")
    assert "times the loss of mine" in both.read_text()
    (tmp_path / "work.html").write_text("<p>years of work</p>")
    for wrong, words in (
        ((solution, tmp_path / "work.html"), "not a report"),
        (({}, tmp_path / "x.html"), "no solution"),
        (([3], tmp_path / "x.html"), "what aipod.solve returns"),
    ):
        with pytest.raises(ValueError, match=words):
            aipod.report(*wrong)


def test_progress_in_a_notebook(monkeypatch):
    """Against the documented interface of IPython: display(obj, display_id=True).update(obj)."""
    shown = []
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.HTML = str
    display.display = lambda html, display_id: SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    solve(progress=True)
    assert 'value="20" max="20"' in shown[-1]
    assert "20/20" in shown[-1]
    # A terminal with IPython is no notebook.
    shell.get_ipython = lambda: SimpleNamespace()
    front = front_for(True)
    front(Progress(1, 2, 0.1, 3.0, aipod.Ledger(), aipod.History({})))
    assert 'value="1"' not in shown[-1]
