"""Makes a notebook from each guide that has code: `make notebooks`.

The Python blocks of a page become code cells, and all else Markdown. Notebooks are written without
outputs, so that they change only when their page does.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
GUIDES, NOTEBOOKS = DOCS / "guides", DOCS / "notebooks"
_BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
# Links that only the site can follow: [`solve`][aipod.solve] and [pages](../table1.md).
_REFERENCE = re.compile(r"\[([^\]]+)\]\[[^\]]*\]")
_PAGE = re.compile(r"\[([^\]]+)\]\((?!http)[^)]*\)")


def cells(page: str) -> list[dict[str, Any]]:
    """The cells of a page, in its order."""
    found = []
    for index, part in enumerate(_BLOCK.split(page)):
        text = part.strip("\n")
        if not text:
            continue
        if index % 2:
            shared: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            shared = {"cell_type": "markdown"}
            text = _PAGE.sub(r"\1", _REFERENCE.sub(r"\1", text))
        found.append(shared | {"metadata": {}, "source": text.splitlines(keepends=True)})
    return found


def notebook(page: str) -> str:
    """The notebook of a page, in format 4.4."""
    content = {
        "cells": cells(page),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def made() -> dict[Path, str]:
    """The notebooks by their path, as they should be."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md"))}
    return {
        NOTEBOOKS / f"{path.stem}.ipynb": notebook(text)
        for path, text in pages.items()
        if _BLOCK.search(text)
    }


def main() -> int:
    NOTEBOOKS.mkdir(exist_ok=True)
    wanted = made()
    for old in set(NOTEBOOKS.glob("*.ipynb")) - set(wanted):
        old.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(wanted)} notebooks in {NOTEBOOKS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
