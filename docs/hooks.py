"""What the pages need beyond Markdown.

- Formulas become MathML when the pages are built, so that no script and no font is needed to read
  them. They are written as GitHub takes them too: a fenced block `math`, or $`...`$ in a line.
- Where a docstring names an equation by the paper's label, the label links to the mathematics.
- Solvers that take the keywords of another one are shown with those keywords.
"""

import re
from typing import Any

from latex2mathml.converter import convert

import aipod

_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")
# What Python says of an __init__ without a docstring.
_EMPTY = re.compile(r"<p>Initialize self\.\s+See help\(type\(self\)\) for accurate signature\.</p>")
_formulas: list[str] = []

# The paper's labels that docstrings cite; each stands on the page on the mathematics.
MATHEMATICS = "mathematics.md"
LABELS = (
    *("opt0", "eq:fed bilevel", "eq.F_grad", "eq.y_grad", "stationary", "A-V2", "proj_y_fed"),
    *("stoc-alg", "update-ys", "NS-wk", "NS-hf"),
    *("stoc-alg-skip", "update-z", "update-yz1", "update-yz2"),
    *("11ab", "update-xkt", "NS-hf-t", "delta-x"),
    *("stoc-alg-skip-WS", "update-hatlambda-WS", "update-lz1-WS", "update-lz2-WS"),
    *("WS-df", "WS-x", "thm", "redu-LL", "redu-UL", "thm:conv-E2", "cor-E2"),
)


def on_startup(**_: Any) -> None:
    """Lets the reference see the signature that a variant of a solver has at run time.

    mkdocstrings looks through `functools.wraps` at the function inside, which has `**arguments`.
    """
    for value in vars(aipod).values():
        if hasattr(value, "__signature__") and hasattr(value, "__wrapped__"):
            del value.__wrapped__


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Formulas leave marks behind: Markdown must not see their bars, stars and underscores."""
    _formulas.clear()
    return _INLINE.sub(_inline, _BLOCK.sub(_block, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The formulas of the page in place of their marks, and labels that lead to their equations."""
    html = re.sub(r"(?:<p>)?FORMULA(\d+)BLOCK(?:</p>)?|FORMULA(\d+)INLINE", _restored, html)
    for label in LABELS:
        html = _linked(html, label, page.file.src_uri)
    return _EMPTY.sub("", html)


def _linked(html: str, label: str, page: str) -> str:
    code, anchor = f"<code>{label}</code>", label.replace(" ", "-")
    if page == MATHEMATICS:
        return html.replace(code, f'<code id="{anchor}">{label}</code>', 1)
    if not page.startswith("reference/"):
        return html
    return html.replace(code, f'<a href="../mathematics.html#{anchor}">{code}</a>')


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
