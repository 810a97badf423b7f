"""Formulas become MathML when the pages are built: no script and no font is needed to read them.

Written as GitHub takes them too: a fenced block `math`, or $`...`$ in a line.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Every formula of a page, rendered."""
    markdown = _BLOCK.sub(
        lambda found: f'<div class="formula">{_rendered(found[1].strip(), "block")}</div>', markdown
    )
    return _INLINE.sub(lambda found: _rendered(found[1], "inline"), markdown)


def _rendered(latex: str, display: str) -> str:
    # On one line: Markdown would take an indented one for code.
    return " ".join(convert(latex, display=display).split())
