"""Formulas become MathML when the pages are built: no script and no font is needed to read them.

Written as GitHub takes them too: a fenced block `math`, or $`...`$ in a line.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")
# What Python says of an __init__ without a docstring.
_EMPTY = re.compile(r"<p>Initialize self\.\s+See help\(type\(self\)\) for accurate signature\.</p>")
_formulas: list[str] = []


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Formulas leave marks behind: Markdown must not see their bars, stars and underscores."""
    _formulas.clear()
    return _INLINE.sub(_inline, _BLOCK.sub(_block, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """The formulas of the page in place of their marks."""
    html = re.sub(r"(?:<p>)?FORMULA(\d+)BLOCK(?:</p>)?|FORMULA(\d+)INLINE", _restored, html)
    return _EMPTY.sub("", html)


def _block(found: re.Match[str]) -> str:
    return f"\nFORMULA{_kept(found[1], 'block')}BLOCK\n"


def _inline(found: re.Match[str]) -> str:
    return f"FORMULA{_kept(found[1], 'inline')}INLINE"


def _kept(latex: str, display: str) -> int:
    _formulas.append(convert(latex.strip(), display=display))
    return len(_formulas) - 1


def _restored(found: re.Match[str]) -> str:
    if found[1] is not None:
        return f'<div class="formula">{_formulas[int(found[1])]}</div>'
    return _formulas[int(found[2])]
