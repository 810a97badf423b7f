"""Tables in HTML. Every cell is text: nothing in it can become part of the page."""

from html import escape


def table(head: list[str], body: list[list[str]], kind: str = "", caption: str = "") -> str:
    """The first cell of a row is its heading; wide tables scroll by themselves."""
    lines = "".join(
        _row(first, [f"<td>{escape(cell)}</td>" for cell in rest]) for first, *rest in body
    )
    return _framed(head, lines, kind, caption)


def merged(head: list[str], body: list[list[str]], kind: str = "") -> str:
    """A table in which a row whose cells are all the same has one wide cell."""
    lines = []
    for first, *rest in body:
        if len(set(rest)) == 1:
            cells = [f'<td colspan="{len(rest)}">{escape(rest[0])}</td>']
        else:
            cells = [f"<td>{escape(cell)}</td>" for cell in rest]
        lines.append(_row(first, cells))
    return _framed(head, "".join(lines), kind)


def _row(first: str, cells: list[str]) -> str:
    return f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>'


def _framed(head: list[str], lines: str, kind: str, caption: str = "") -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{title}'
        f"<thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
