"""What README claims is what was stored; `make claims` measures the rest again."""

from pathlib import Path

import pytest

from benchmarks import claims


def test_the_table_of_the_readme_is_the_one_of_the_stored_results(tmp_path):
    (found,) = claims.communication(tmp_path)
    assert found.claimed == 17
    assert found.holds


@pytest.mark.parametrize(
    ("measured", "holds"), [(1.04, True), (1.11, False), (float("nan"), False)]
)
def test_a_claim_holds_within_its_margin(measured, holds):
    assert claims.Found("README.md", "a number", 1.0, measured, 0.1).holds is holds


def test_a_study_is_compared_row_by_row(tmp_path, monkeypatch):
    page = (
        "| problem | cost | measured |\n|---|---|---|\n| a | x | 2.01 |\n| b | y | not reached |\n"
    )
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(claims, "ROOT", tmp_path)

    def measured(folder: Path, *words):
        folder.mkdir()
        (folder / "table.md").write_text(page.replace("2.01", "2.5"))

    monkeypatch.setattr(claims, "command", measured)
    (found,) = claims.study(["rates"], "page.md", 2)(tmp_path / "run")
    assert (found.what, found.claimed, found.measured, found.holds) == ("a, x", 2.01, 2.5, False)
