"""`aipod compare`."""

import json
from typing import Any

from rich.markup import escape

from aipod.cli._opening import EXIT, opened
from aipod.cli._options import Request
from aipod.cli._show import comparison_table, err, out
from aipod.cli._watch import Watch
from aipod.experiments import load
from aipod.experiments.compare import CompareConfig, resolve_comparison
from aipod.experiments.execute import Prepared, execute, prepare
from aipod.experiments.numbers import number
from aipod.runs._environment import environment
from aipod.runs._folder import RunFolder, finite


def compare(request: Request) -> int:
    config, ready, folder = opened(request, resolve_comparison, _prepare, _name)
    summaries, stopped = _execute_all(config, ready, folder, request.tensorboard)
    if stopped:
        err.print(
            "interrupted; finished runs are kept. Go on with: aipod compare --resume --out "
            f"{escape(str(folder.path))}"
        )
        return EXIT["interrupted"]
    diverged = any(summary["result"] == "diverged" for summary in summaries)
    if not any(summary["last"] for summary in summaries):
        err.print(
            "aipod: every run ended before anything was recorded: choose smaller steps, such as "
            "--lower-lr curvature."
        )
        if request.as_json:
            print(json.dumps({"kind": "comparison", "tables": [], "folder": str(folder.path)}))
        return EXIT["diverged"]
    summary = _conclude(config, folder)
    if request.as_json:
        print(json.dumps(finite(summary | {"folder": str(folder.path)})))
    else:
        _show(summary, folder)
    return EXIT["diverged"] if diverged else 0


def _name(config: CompareConfig) -> str:
    name = config.model.experiment
    return f"{load(name).folder or name}-comparison"


def _prepare(config: CompareConfig) -> dict[str, Prepared]:
    """Builds the problem once for all variants; variants with equal runs are prepared once."""
    ready: dict[str, Prepared] = {}
    task = None
    for folder, variants in config.folders().items():
        ready[folder] = prepare(config.runs[variants[0]], task)
        task = ready[folder].task
    return ready


def _execute_all(
    config: CompareConfig, ready: dict[str, Prepared], folder: RunFolder, tensorboard: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Runs every variant with every seed; returns the summaries and whether it was interrupted."""
    summaries = []
    with Watch(len(ready) * config.seeds) as watch:
        for name, prepared in ready.items():
            for seed in config.seed_range():
                one = prepared.with_seed(seed)
                place = RunFolder(folder.runs / name / f"seed-{seed}")
                watch.begin(f"{name}, seed {seed}", config.model.steps)
                summary = _finished(place, one)
                if summary is None:
                    place.path.mkdir(parents=True, exist_ok=True)
                    place.write_config(one.config.toml())
                    summary = execute(one, place, resume=True, front=watch, tensorboard=tensorboard)
                    watch.end(_in_short(summary))
                summaries.append(summary)
                if watch.stopped:
                    return summaries, True
    return summaries, any(summary["result"] == "interrupted" for summary in summaries)


def _in_short(summary: dict[str, Any]) -> str:
    metric = summary["metrics"][0]["name"]
    value = f", {metric} {number(summary['last'][metric], 4)}" if summary["last"] else ""
    return f"{summary['result']}{value}, {summary['seconds']:.1f} s"


def _finished(place: RunFolder, run: Prepared) -> dict[str, Any] | None:
    """Returns the summary if this run has already ended; a damaged run is repeated."""
    from aipod._report.reading import read_run, read_summary

    if not place.is_run() or place.config.read_bytes() != run.config.toml().encode():
        return None
    try:
        summary = read_summary(place.path)
        if summary.get("last") != {}:
            read_run(place.path, summary)
    except ValueError:
        return None
    # An interrupted run continues from its checkpoint.
    return summary if summary.get("result", "interrupted") != "interrupted" else None


def _conclude(config: CompareConfig, folder: RunFolder) -> dict[str, Any]:
    """Writes the comparison's summary and figure, from the folders of its runs."""
    from aipod._report import claims
    from aipod._report.collect import collect
    from aipod._report.figures import comparison_figure
    from aipod._report.reading import AXES

    summary: dict[str, Any] = {
        "kind": "comparison",
        "experiment": config.model.experiment,
        "panels": [{"title": p.title, "variants": list(p.variants)} for p in config.panels],
        "references": _references(config),
        "folders": {v: name for name, variants in config.folders().items() for v in variants},
        "environment": environment(),
    }
    folder.write_summary(summary)
    section = collect([folder.path])[0]
    summary |= {
        "metric": section.metrics[0]["label"],
        "cost": AXES[section.axes[0]],
        "tables": claims.as_data(section),
        "sentences": claims.sentences(section),
    }
    folder.write_summary(summary)
    comparison_figure(section, folder.figures)
    return finite(summary)


def _references(config: CompareConfig) -> list[dict[str, Any]]:
    """Returns the experiment's reference curves as plain data."""
    experiment = load(config.model.experiment)
    titles = {panel.title for panel in config.panels}
    return [
        {
            "panels": list(one.panels),
            "label": one.label,
            "columns": {name: column.tolist() for name, column in one.columns.items()},
        }
        for one in experiment.references(experiment.options(**config.model.options))
        if titles & set(one.panels)
    ]


def _show(summary: dict[str, Any], folder: RunFolder) -> None:
    for panel in summary["tables"]:
        out.print(comparison_table(panel, summary["metric"], summary["cost"]))
    for sentence in summary["sentences"]:
        out.print(escape(sentence))
    shown = escape(str(folder.path))
    err.print(f"written to {shown}; next: aipod report {shown}")
