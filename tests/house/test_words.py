"""The words that people search for lead somewhere."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.split("|")[1:3]
    for line in (ROOT / "docs" / "guides" / "words.md").read_text().splitlines()[6:]
    if line.startswith("|")
]
WORDS = (
    *("callback", "logging", "early stopping", "constraint", "simplex", "gradient accumulation"),
    *("device", "checkpoint", "torch", "Hugging Face", "Weights & Biases", "notebook", "seed"),
    *("learning rate", "GPU", "plot", "progress bar", "privacy", "dataset", "resume"),
)


@pytest.mark.parametrize("word", WORDS)
def test_each_word_stands_in_the_list_with_a_link(word):
    found = [where for words, where in ROWS if word.lower() in (words + where).lower()]
    assert found
    assert any(re.search(r"\]\(|\]\[", where) for where in found)


def test_the_list_is_sorted_and_every_row_leads_somewhere():
    assert len(ROWS) > 25
    keys = [words.strip().lower() for words, _ in ROWS]
    assert keys == sorted(keys)
    assert [w for w, where in ROWS if "](" not in where and "][" not in where] == []


def test_the_site_finds_them():
    index = ROOT / "site" / "search" / "search_index.json"
    written = max(page.stat().st_mtime for page in (ROOT / "docs").rglob("*.md"))
    if not index.exists() or index.stat().st_mtime < written:
        pytest.skip("the documentation is not built: make docs")
    pages = json.loads(index.read_text())["docs"]
    for word in WORDS:
        assert any(word.lower() in page["text"].replace("&amp;", "&").lower() for page in pages)
