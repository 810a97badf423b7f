"""The complete configuration of a run, made from options and files, and written to config.toml."""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from aipod.experiments import load, solvers, values
from aipod.experiments.base import Experiment, checks
from aipod.experiments.own import refuse_changed
from aipod.experiments.toml import dump, header
from aipod.experiments.values import Plain

# The settings that every run has, besides the solver's arguments and the experiment's options.
RUN_NAMES = ("experiment", "solver", "steps", "every", "seed", "x64")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run. Options of the command and keys of `config.toml` have the same names."""

    experiment: str
    solver: str
    steps: int
    every: int
    seed: int
    x64: bool
    arguments: dict[str, Plain]
    options: dict[str, Plain]
    task_digest: str | None = None

    def own(self) -> dict[str, Plain]:
        """What only the configuration of a task in a user's own file holds."""
        return {} if self.task_digest is None else {"task_digest": self.task_digest}

    def flat(self) -> dict[str, Plain]:
        """All settings in one dictionary."""
        run: dict[str, Plain] = {name: getattr(self, name) for name in RUN_NAMES}
        return run | self.own() | self.arguments | self.options

    def toml(self) -> str:
        return (
            header("run")
            + dump({name: getattr(self, name) for name in RUN_NAMES} | self.own())
            + f"\n# arguments of the solver {self.solver}\n"
            + dump(self.arguments)
            + self.options_toml()
        )

    def options_toml(self) -> str:
        return f"\n# options of the experiment {self.experiment}\n" + dump(self.options)


def read(path: Path) -> dict[str, Any]:
    """Reads a configuration file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: give the path of a TOML file.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}.") from None
    for name, value in found.items():
        if isinstance(value, dict):
            raise ValueError(f"{path}: write what [{name}] holds at the top, without that heading.")
    return found


def assignments(texts: list[str]) -> dict[str, Any]:
    """Parses `name=value` pairs; values are TOML, and anything else is text."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ValueError(
                f"{values.shown(text)} is not of the form name=value, such as lower_prob=0.1."
            )
        found[name.strip().replace("-", "_")] = _literal(value.strip())
    return found


def _literal(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def resolve(given: Mapping[str, Any]) -> RunConfig:
    """Makes the configuration from the given names and the defaults, or raises `ValueError`."""
    if "experiment" not in given:
        raise ValueError(
            "name an experiment, as in `aipod run synthetic`; `aipod list` has them all."
        )
    experiment = load(str(given["experiment"]))
    if experiment.digest is not None:
        given = dict(given)
        refuse_changed(experiment, given.pop("task_digest", None))
    solver = str(given.get("solver", experiment.solver))
    known = solvers.defaults(solver)
    options = checks(experiment.options)
    _refuse_unknown(given, RUN_NAMES, solver, known, experiment)
    arguments = resolve_arguments(
        solver, experiment, {k: v for k, v in given.items() if k in known}
    )
    return RunConfig(
        experiment=experiment.name,
        solver=solver,
        steps=values.within(given.get("steps", experiment.steps), "steps", 1),
        every=values.within(given.get("every", experiment.every), "every", 1),
        seed=values.within(given.get("seed", 0), "seed", 0),
        x64=values.flag(given.get("x64", jax.config.read("jax_enable_x64")), "x64"),
        arguments=arguments,
        options=resolve_options(experiment, {k: v for k, v in given.items() if k in options}),
        task_digest=experiment.digest,
    )


def resolve_arguments(
    solver: str, experiment: Experiment, given: Mapping[str, Any]
) -> dict[str, Plain]:
    """Merges the solver's defaults, the experiment's and the given arguments; later ones win."""
    known = solvers.defaults(solver)
    chosen = known | dict(experiment.arguments.get(solver, {})) | dict(given)
    checked = {
        name: solvers.ARGUMENTS[name].check(value, name)
        for name, value in chosen.items()
        if value is not None
    }
    # An optimiser replaces the default step size; only E-AiPOD with T > 1 needs both.
    both = "extrapolation" in known and checked.get("upper_steps") != 1
    if "upper_optimizer" in checked and "upper_lr" not in given and not both:
        checked.pop("upper_lr", None)
    return checked


def resolve_options(experiment: Experiment, given: Mapping[str, Any]) -> dict[str, Plain]:
    """Checks the given options and returns all options of the experiment."""
    checked = {name: check(given[name], name) for name, check in _given(experiment, given)}
    options = dataclasses.asdict(experiment.options(**checked))
    return {name: value for name, value in options.items() if value is not None}


def _given(
    experiment: Experiment, given: Mapping[str, Any]
) -> list[tuple[str, Callable[[Any, str], Plain]]]:
    return [(name, check) for name, check in checks(experiment.options).items() if name in given]


def refuse_unknown_options(experiment: Experiment, given: Mapping[str, Any]) -> None:
    known = checks(experiment.options)
    for name in given:
        if name not in known:
            if not known:
                raise ValueError(
                    f"{experiment.name}: it takes no options, got {values.shown(name)}."
                )
            raise ValueError(
                f"{experiment.name} has no option {values.shown(name)}."
                f"{values.suggestion(name, known)} It takes {', '.join(known)}."
            )


def _refuse_unknown(
    given: Mapping[str, Any],
    run_names: tuple[str, ...],
    solver: str,
    arguments: Mapping[str, Any],
    experiment: Experiment,
) -> None:
    options = checks(experiment.options)
    for name in given:
        if name in run_names or name in arguments or name in options:
            continue
        takes = f"{solver} takes {', '.join(arguments)}"
        if name in solvers.ARGUMENTS:
            raise ValueError(f"the solver {solver} has no argument {name}: {takes}.")
        known = [*run_names, *arguments, *options]
        raise ValueError(
            f"there is no option {values.shown(name)}.{values.suggestion(name, known)} {takes}; "
            f"{experiment.name} takes {', '.join(options)}; "
            f"every run takes {', '.join(run_names)}."
        )
