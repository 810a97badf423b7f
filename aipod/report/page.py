"""The report: one HTML file with interactive charts that opens without a network."""

import base64
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from aipod._misc.version import __version__
from aipod.experiments import SUMMARIES
from aipod.report import claims
from aipod.report.collect import Group, Section, View
from aipod.report.curves import AXES, available_axes, curve, rows, thinned
from aipod.report.style import COLOURS, DARK_COLOURS, DARK_REFERENCE, LINES, REFERENCE
from aipod.runs._folder import RunFolder, finite

MARK = '<meta name="generator" content="aipod report">'

_COLUMNS = (
    "Relative: to the first line of the table, after as many outer steps. At most: the largest "
    "such ratio at any recorded step. Values are medians over seeds."
)


def write_report(sections: Sequence[Section], path: Path, *, force: bool = False) -> None:
    """Writes the page; an older report is replaced, any other file only by `force`."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --out a file, such as report.html.")
    if path.exists() and not force and MARK not in path.read_text(errors="replace")[:2000]:
        raise ValueError(f"{path} is not a report: choose another file with --out, or add --force.")
    text = page(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page(sections: Sequence[Section]) -> str:
    from plotly.offline import get_plotlyjs

    experiments = ", ".join(section.experiment for section in sections)
    runs = sum(len(group.runs) for section in sections for group in section.groups)
    return Template(_part("page.html")).substitute(
        title=escape(f"aipod: {experiments}"),
        subtitle=escape(f"{runs} run{'s' * (runs > 1)}; written by aipod {__version__}"),
        style=_part("page.css"),
        sections="\n".join(_section(index, section) for index, section in enumerate(sections)),
        environment=_environments(sections),
        data=_embedded({"sections": [_data(section) for section in sections]}),
        plotly=get_plotlyjs(),
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return resources.files("aipod.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")


def _data(section: Section) -> dict[str, Any]:
    axes = available_axes(section.groups)
    references = list(dict.fromkeys(r.label for view in section.views for r in view.references))
    first = len(section.groups)
    return {
        "axis": section.axes[0],
        "axes": [[name, AXES[name]] for name in axes],
        "metrics": section.metrics,
        "views": [
            {
                "title": view.title,
                "traces": [group.index for group in view.groups]
                + [first + references.index(reference.label) for reference in view.references],
            }
            for view in section.views
        ],
        "traces": [_trace(group, section, axes) for group in section.groups]
        + [_reference(label, section) for label in references],
    }


def _trace(group: Group, section: Section, axes: list[str]) -> dict[str, Any]:
    chosen = thinned(rows(group))
    metrics = [metric["name"] for metric in section.metrics]
    several = len(group.runs) > 1
    return {
        "label": group.label,
        "colour": COLOURS[group.index % len(COLOURS)],
        "dark": DARK_COLOURS[group.index % len(DARK_COLOURS)],
        "dash": LINES[group.index % len(LINES)][1],
        "seeds": len(group.runs),
        "columns": {name: _digits(curve(group, name).middle[chosen]) for name in [*axes, *metrics]},
        "ranges": {
            name: [
                _digits(part[chosen]) for part in (curve(group, name).low, curve(group, name).high)
            ]
            for name in metrics
            if several
        },
    }


def _reference(label: str, section: Section) -> dict[str, Any]:
    """What others have measured, as a dotted line; it may not know every axis."""
    found = next(r for view in section.views for r in view.references if r.label == label)
    return {
        "label": label,
        "colour": REFERENCE,
        "dark": DARK_REFERENCE,
        "dash": "dot",
        "seeds": 1,
        "columns": {name: _digits(column) for name, column in found.columns.items()},
        "ranges": {},
    }


def _digits(column: Any) -> list[float]:
    """Six digits are more than a screen shows, and a third of the size."""
    return [float(f"{value:.6g}") for value in column]


def _section(index: int, section: Section) -> str:
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in claims.sentences(section))
    findings = f'<ol class="findings">{said}</ol>' if said else ""
    seeds = max(len(group.runs) for group in section.groups)
    note = "Lines are medians over seeds, shaded areas the range over seeds. " if seeds > 1 else ""
    tables = "\n".join(_summary_table(section, view) for view in section.views)
    return f"""<section id="section-{index}" aria-label="{escape(section.experiment)}">
<h2>{escape(section.experiment)}</h2>
<p>{escape(_sentence(SUMMARIES.get(section.experiment, "")))}</p>
{findings}
<div class="controls" role="group" aria-label="What the chart shows"></div>
<div class="chart"></div>
<ul class="legend" aria-label="Lines"></ul>
<p class="quiet">{note}Drag to zoom, double-click to zoom out.</p>
{_pictures(section)}
<h3>Summary</h3>
{tables}
<p class="quiet">{_COLUMNS}</p>
<h3>Configuration</h3>
{_configuration(section)}
</section>"""


def _pictures(section: Section) -> str:
    """The experiment's own picture for each group, of its first seed, where the runs drew one."""
    several = len(section.groups) > 1
    shown = []
    for group in section.groups:
        run = group.runs[0]
        file = RunFolder(run.path).figures / "picture.png"
        caption = run.summary.get("picture")
        if not caption or not file.is_file():
            continue
        # The page's policy fetches nothing, not even a file beside it.
        source = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode("ascii")
        words = f"{group.label}, seed {run.summary['seed']}. {caption}" if several else caption
        shown.append(
            f'<figure><img src="{source}" alt="{escape(words)}">'
            f"<figcaption>{escape(words)}</figcaption></figure>"
        )
    return "<h3>Result</h3>\n" + "\n".join(shown) if shown else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _summary_table(section: Section, view: View) -> str:
    metric, cost = section.metrics[0]["label"], AXES[section.axes[0]]
    head = [
        "",
        "result",
        "outer steps",
        metric,
        "relative",
        "at most",
        cost,
        "relative",
        "time (s)",
    ]
    body = [
        [
            row.label,
            ", ".join(f"{count} {name}" for name, count in row.results.items()),
            f"{row.step:,}",
            claims.number(row.value),
            f"{row.ratio:.2f}",
            f"{row.worst:.2f}",
            f"{row.cost:,.0f}",
            claims.percent(row.cost_ratio),
            f"{row.seconds:.2f}",
        ]
        for row in claims.table(section, view)
    ]
    return _table(head, body, caption=view.title)


def _configuration(section: Section) -> str:
    """A row for each name; one cell where all groups agree."""
    labels = [group.label for group in section.groups]
    names = dict.fromkeys(name for group in section.groups for name in group.config)
    lines = []
    for name in names:
        cells = [_plain(group.config.get(name, "")) for group in section.groups]
        if len(set(cells)) == 1:
            values = f'<td colspan="{len(cells)}">{escape(cells[0])}</td>'
        else:
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in ["", *labels])
    return (
        '<div class="scroll" tabindex="0"><table class="values">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _environments(sections: Sequence[Section]) -> str:
    found: list[dict[str, Any]] = []
    for section in sections:
        for group in section.groups:
            for run in group.runs:
                if run.summary["environment"] not in found:
                    found.append(run.summary["environment"])
    return "\n".join(
        _table(["", "version or value"], [[name, _plain(v)] for name, v in one.items()], "values")
        for one in found
    )


def _table(head: list[str], body: list[list[str]], kind: str = "", caption: str = "") -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{title}'
        f"<thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
