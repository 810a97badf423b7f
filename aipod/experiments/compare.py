"""The configuration of a comparison: variants of solvers, each with several seeds."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from aipod.experiments import load, solvers, values
from aipod.experiments.base import Experiment, Panel
from aipod.experiments.config import RUN_NAMES, RunConfig, assignments, resolve
from aipod.experiments.toml import dump, header
from aipod.experiments.values import Plain

MOST_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """A comparison.

    - `model`: what all runs share; each run has its own solver and seed.
    - `seeds`: how many; the first is the seed of the model.
    - `common`: arguments for all variants that accept them.
    - `runs`: the configuration of each variant in the panels.
    """

    model: RunConfig
    seeds: int
    common: dict[str, Plain]
    panels: tuple[Panel, ...]
    runs: dict[str, RunConfig]

    def _names(self) -> dict[str, Any]:
        """The names that every comparison has, in the order of the file."""
        own = {name: getattr(self.model, name) for name in RUN_NAMES if name != "solver"}
        return {
            "experiment": own.pop("experiment"),
            "seeds": self.seeds,
            **own,
            **self.model.own(),
        }

    def toml(self) -> str:
        text = header("compare") + dump(self._names())
        if self.common:
            text += "\n# arguments of every solver that takes them\n" + dump(self.common)
        text += self.model.options_toml()
        for panel in self.panels:
            text += "\n[[panel]]\n" + dump({"title": panel.title, "variants": panel.variants})
        return text

    def flat(self) -> dict[str, Any]:
        """All settings in one dictionary."""
        solvers = [variant for panel in self.panels for variant in panel.variants]
        chosen = {"solvers": ",".join(solvers)}
        return self._names() | self.common | self.model.options | chosen

    def seed_range(self) -> range:
        return range(self.model.seed, self.model.seed + self.seeds)

    def folders(self) -> dict[str, list[str]]:
        """Returns a folder name for each distinct run, with its variants.

        Two panels may list the same run under different names; it runs once.
        """
        found: dict[str, list[str]] = {}
        for variant, run in self.runs.items():
            same = (name for name, variants in found.items() if self.runs[variants[0]] == run)
            found.setdefault(next(same, _folder_name(variant, found)), []).append(variant)
        return found


def _folder_name(variant: str, taken: Collection[str]) -> str:
    """A name that is valid on every file system."""
    name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", variant).strip("_.")[:100]
    return name if name not in taken else f"{name}-{len(taken)}"


def resolve_comparison(given: Mapping[str, Any]) -> CompareConfig:
    """Makes the configuration from the given names and the defaults."""
    if "experiment" not in given:
        raise ValueError(
            "name an experiment, as in `aipod compare synthetic`; `aipod list` has them all."
        )
    experiment = load(str(given["experiment"]))
    rest = {k: v for k, v in given.items() if k not in ("solvers", "panel", "seeds")}
    common = {k: v for k, v in rest.items() if k in solvers.ARGUMENTS}
    shared = {k: v for k, v in rest.items() if k not in common}
    if "solver" in shared:
        raise ValueError("a comparison takes solvers, as in --solvers aipod,e-aipod.")
    model = resolve(shared)
    seeds = values.within(given.get("seeds", 5), "seeds", 1, MOST_SEEDS)
    panels = _panels(experiment, given, experiment.options(**model.options))
    runs, used = _runs(panels, common, shared)
    for name in common:
        if name not in used:
            raise ValueError(f"none of the compared solvers has an argument {name}.")
    return CompareConfig(
        model=model,
        seeds=seeds,
        common={name: solvers.ARGUMENTS[name].check(value, name) for name, value in common.items()},
        panels=panels,
        runs=runs,
    )


def _panels(experiment: Experiment, given: Mapping[str, Any], options: Any) -> tuple[Panel, ...]:
    if "solvers" in given:
        wanted = given["solvers"]
        names = wanted.split(",") if isinstance(wanted, str) else wanted
        return (Panel("", _variants(names, "solvers")),)
    if "panel" in given:
        tables = given["panel"]
        if not isinstance(tables, list) or not tables:
            raise ValueError("panel must be one or more [[panel]] with a title and its variants.")
        return tuple(_panel_of(table) for table in tables)
    return experiment.panels(options)


def _panel_of(table: Any) -> Panel:
    if not isinstance(table, Mapping) or set(table) != {"title", "variants"}:
        raise ValueError("each [[panel]] must hold a title and its variants, and nothing else.")
    return Panel(str(table["title"]), _variants(table["variants"], "variants"))


def _variants(names: Any, what: str) -> tuple[str, ...]:
    named = isinstance(names, list | tuple) and all(isinstance(n, str) and n.strip() for n in names)
    if not named or not names:
        raise ValueError(f"{what} must name solvers, such as aipod,e-aipod:lower_prob=0.1.")
    return tuple(dict.fromkeys(name.strip() for name in names))


def _runs(
    panels: tuple[Panel, ...], common: Mapping[str, Any], shared: Mapping[str, Any]
) -> tuple[dict[str, RunConfig], set[str]]:
    """Returns a run for each variant, and the common arguments that some variant accepts."""
    runs: dict[str, RunConfig] = {}
    used: set[str] = set()
    for variant in dict.fromkeys(name for panel in panels for name in panel.variants):
        solver, *own = variant.split(":")
        takes = {name: value for name, value in common.items() if name in solvers.defaults(solver)}
        used |= set(takes)
        chosen = assignments(own)
        for name in chosen:
            # All variants solve the same problem in the same number of steps.
            if name not in solvers.ARGUMENTS:
                raise ValueError(
                    f"{values.shown(variant)}: {name} is no argument of a solver; what holds for "
                    "all of them is an option of its own."
                )
        runs[variant] = resolve({**shared, "solver": solver, **takes, **chosen})
    return runs, used
