"""The report: one HTML file with interactive charts that opens without a network."""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from aipod._misc.version import __version__
from aipod._report import claims
from aipod._report.collect import Group, Section, View
from aipod._report.curves import available_axes, curve, rows, thinned
from aipod._report.pictures import picture
from aipod._report.reading import AXES
from aipod._report.studies import Study
from aipod._report.studies import section as study_section
from aipod._report.style import COLOURS, DARK_COLOURS, DARK_REFERENCE, LINES, REFERENCE
from aipod._report.tables import merged, table
from aipod._report.verdicts import verdicts
from aipod.experiments import SUMMARIES
from aipod.experiments.numbers import number, percent, ratio
from aipod.runs._folder import finite

MARK = '<meta name="generator" content="aipod report">'

_COLUMNS = (
    "Relative: to the first line of the table, after as many outer steps. At most: the largest "
    "such ratio at any recorded step. Values are medians over seeds."
)


def write_report(
    sections: Sequence[Section],
    path: Path,
    studies: Sequence[Study] = (),
    *,
    force: bool = False,
) -> None:
    """Writes the page. It replaces an older report; any other file only with `force`."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --out a file, such as report.html.")
    if path.exists() and not force and MARK not in path.read_text(errors="replace")[:2000]:
        raise ValueError(f"{path} is not a report: choose another file with --out, or add --force.")
    text = page(sections, studies)
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON may hold lone surrogates, which UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="replace")


def page(sections: Sequence[Section], studies: Sequence[Study] = ()) -> str:
    from plotly.offline import get_plotlyjs

    names = [section.experiment for section in sections] + [study.title for study in studies]
    runs = sum(len(group.runs) for section in sections for group in section.groups)
    counted = f"{runs} run{'s' * (runs > 1)}" if runs else "measurements"
    shown = [_section(index, section) for index, section in enumerate(sections)]
    shown += [study_section(index, study) for index, study in enumerate(studies)]
    return Template(_part("page.html")).substitute(
        title=escape("aipod: " + ", ".join(names)),
        subtitle=escape(f"{counted}; written by aipod {__version__}"),
        style=_part("page.css"),
        sections="\n".join(shown),
        environment=_environments(sections, studies),
        data=_embedded({"sections": [_data(section) for section in sections]}),
        plotly=get_plotlyjs() if sections else "",
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return resources.files("aipod._report").joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """Returns JSON in which no text can close the script element."""
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
    """A reference curve as a dotted line; it may lack some of the axes."""
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
    """Rounds to six digits, which is more than a screen shows and a third of the size."""
    return [float(f"{value:.6g}") for value in column]


def _section(index: int, section: Section) -> str:
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in claims.sentences(section))
    findings = f'<ol class="findings">{said}</ol>' if said else ""
    seeds = max(len(group.runs) for group in section.groups)
    note = "Lines are medians over seeds, shaded areas the range over seeds. " if seeds > 1 else ""
    tables = "\n".join(_summary_table(section, view) for view in section.views)
    return f"""<section id="section-{index}" aria-label="{escape(section.experiment)}">
<h2>{escape(section.experiment)}</h2>
<p>{escape(_sentence(_about(section)))}</p>
{findings}
<div class="controls" role="group" aria-label="What the chart shows"></div>
<div class="chart"></div>
<ul class="legend" aria-label="Lines"></ul>
<p class="quiet">{note}Drag to zoom, double-click to zoom out.</p>
{_pictures(section)}
<h3>Summary</h3>
{tables}
<p class="quiet">{_COLUMNS}</p>
{verdicts(section)}
<h3>Configuration</h3>
{_configuration(section)}
</section>"""


def _pictures(section: Section) -> str:
    """The experiment's picture for the first seed of each group, if there is one."""
    several = len(section.groups) > 1
    shown = []
    for group in section.groups:
        run = group.runs[0]
        caption = run.summary.get("picture")
        if isinstance(caption, str) and caption:
            words = f"{group.label}, seed {run.summary['seed']}. {caption}" if several else caption
            shown.append(picture(run.path, "picture", words))
    found = "\n".join(filter(None, shown))
    return f"<h3>Result</h3>\n{found}" if found else ""


def _about(section: Section) -> str:
    """The line of the experiment; of a task of one's own the one that its folder holds."""
    own = section.groups[0].runs[0].summary.get("about")
    return SUMMARIES.get(section.experiment, own if isinstance(own, str) else "")


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
            number(row.step),
            number(row.value),
            ratio(row.ratio),
            ratio(row.worst),
            number(row.cost, 0),
            percent(row.cost_ratio),
            ratio(row.seconds),
        ]
        for row in claims.table(section, view)
    ]
    return table(head, body, caption=view.title)


def _configuration(section: Section) -> str:
    """One row for each setting."""
    names = dict.fromkeys(name for group in section.groups for name in group.config)
    body = [[name, *(_plain(g.config.get(name, "")) for g in section.groups)] for name in names]
    return merged(["", *(group.label for group in section.groups)], body, "values")


def _environments(sections: Sequence[Section], studies: Sequence[Study]) -> str:
    runs = [run for section in sections for group in section.groups for run in group.runs]
    summaries = [run.summary for run in runs] + [study.summary for study in studies]
    found: list[dict[str, Any]] = []
    for summary in summaries:
        if summary["environment"] not in found:
            found.append(summary["environment"])
    return "\n".join(
        table(["", "version or value"], [[name, _plain(v)] for name, v in one.items()], "values")
        for one in found
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
