"""HTML tables. Every cell is escaped."""

from html import escape


def table(head: list[str], body: list[list[str]], kind: str = "", caption: str = "") -> str:
    """Returns a table; the first cell of each row is its heading. Wide tables scroll."""
    lines = "".join(
        _row(first, [f"<td>{escape(cell)}</td>" for cell in rest]) for first, *rest in body
    )
    return _framed(head, lines, kind, caption)


def merged(head: list[str], body: list[list[str]], kind: str = "") -> str:
    """Returns a table in which a row of equal cells becomes one wide cell."""
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
