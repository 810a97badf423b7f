"""The solvers by their names in the command, and how their arguments are checked."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import aipod
from aipod.experiments import values
from aipod.experiments.values import Plain


@dataclasses.dataclass(frozen=True)
class Entry:
    """`function`: its name in `aipod`; `label`: its name in figures."""

    function: str
    label: str
    summary: str


SOLVERS = {
    "aipod": Entry("AiPOD", "AiPOD", "every step of both levels is projected"),
    "e-aipod": Entry("EAiPOD", "E-AiPOD", "projections of y are skipped at random and made up for"),
    "e2-aipod": Entry("E2AiPOD", "E2-AiPOD", "the adjoint skips too; only without coupling"),
    "e3-aipod": Entry("E3AiPOD", "E3-AiPOD", "ours: one round per outer step, no steps to tune"),
    "fednest": Entry("FedNest", "FedNest", "federations: variance-reduced local steps"),
    "lfednest": Entry("LFedNest", "LFedNest", "federations: the light version, all steps local"),
    "simfbo": Entry("SimFBO", "SimFBO", "federations: y, z and x at once, one round, drifting"),
    "fedbioacc": Entry("FedBiOAcc", "FedBiOAcc", "federations: SimFBO's steps, along momenta"),
    "fedmbo": Entry("FedMBO", "FedMBO", "federations: each factor of a series is another client's"),
    "fed-f2sa": Entry("FedF2SA", "F2SA, federated", "federations: first derivatives, one round"),
    "fedavg": Entry("FedAvg", "FedAvg", "federations: local steps blind to the nesting, the floor"),
    "d-soba": Entry("DSOBA", "D-SOBA", "gossip: one step of everything at once, uncorrected"),
    "sparkle": Entry("SPARKLE", "SPARKLE", "gossip: one step at a time, by exact diffusion"),
    "alset": Entry("ALSET", "ALSET", "AiPOD without constraints"),
    "bsa": Entry("BSA", "BSA", "more and more steps on y; without constraints"),
    "stocbio": Entry("StocBiO", "stocBiO", "large batches, constant steps; without constraints"),
    "ttsa": Entry("TTSA", "TTSA", "one step on y, a slower one on x; constraints on x alone"),
    "soba": Entry("SOBA", "SOBA", "one step of everything at once; without constraints"),
    "ig-al": Entry("IGAL", "IG-AL", "y to a tolerance, exact adjoint; no noise, x free"),
    "first-order-penalty": Entry(
        "FirstOrderPenalty", "First-order penalty", "no second derivatives; no noise"
    ),
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument: the check of a plain value, the paper's symbol, and a line of help.

    `make` converts the plain value into an object; None if the solver takes the value itself.
    """

    check: Callable[[Any, str], Plain]
    symbol: str
    help: str
    make: Callable[[Plain, str], Any] | None = None


def _rate(symbol: str, what: str) -> Argument:
    return Argument(values.step_size, symbol, what, values.make_step_size)


def _probability(symbol: str, what: str) -> Argument:
    return Argument(values.number, symbol, what, values.make_probability)


ARGUMENTS = {
    "upper_lr": _rate("α", "step size of x"),
    "lower_lr": _rate("β", "step size of y: a number, curvature or curvature(0.5)"),
    "lower_steps": Argument(values.whole, "S", "steps on y in each outer step"),
    "lower_episodes": Argument(values.whole, "", "FedNest: local loops on y in each outer step"),
    "local_steps": Argument(values.whole, "τ", "SimFBO and its kin: steps between two rounds"),
    "lower_prob": _probability("p", "how often y is projected, in (0, 1]"),
    "upper_steps": Argument(values.whole, "T", "steps on x for each projection of x"),
    "extrapolation": Argument(values.number, "δ", "how far towards the projected x, at least 1"),
    "adjoint_steps": Argument(values.whole, "N", "terms or steps of the adjoint"),
    "adjoint_lr": _rate("ρ", "step size of the adjoint: a number, curvature or curvature(0.5)"),
    "upper_server_lr": _rate("γ", "SimFBO, F2SA: the server's step of x, by default upper_lr"),
    "lower_server_lr": _rate("γ", "SimFBO, F2SA: the server's step of y, by default lower_lr"),
    "adjoint_server_lr": _rate("γ", "SimFBO, F2SA: the server's step of z, by default adjoint_lr"),
    "momentum": Argument(values.number, "a", "FedBiOAcc: the weight of the newest derivative"),
    "radius": Argument(values.number, "r", "SimFBO: the largest norm of z"),
    "adjoint_prob": _probability("q", "how often the adjoint is projected, in (0, 1]"),
    "adjoint_random": Argument(values.flag, "", "the paper's random number of Neumann factors"),
    "damping": Argument(values.number, "", "a Tikhonov term on the lower Hessian"),
    "compression": Argument(
        values.choice("bfloat16", "float16", "float8", "float4"),
        "",
        "messages of 16, 8 or 4 bits, for e3-aipod in federations",
    ),
    "memory": Argument(
        values.flag,
        "",
        "whether absent clients count with their last direction of x (e3-aipod); left out: where "
        "that takes at most 64 MiB",
    ),
    "relaxation": Argument(
        values.number, "", "how many times its plain update a correction moves (e3-aipod), below 2"
    ),
    "growth": Argument(values.number, "", "steps on y, over the root of the outer step (BSA)"),
    "decay": Argument(values.number, "", "how fast the steps on y shrink (BSA)"),
    "batch": Argument(values.whole, "", "draws averaged into each sample (stocBiO)"),
    "average": _probability("θ", "how much the newest hypergradient counts (D-SOBA, SPARKLE)"),
    "penalty": Argument(values.number, "σ", "weight of the constraint on y in a Lagrangian"),
    "tolerance": Argument(values.number, "", "how exactly a Lagrangian solves for y"),
    "perturbation": Argument(values.number, "", "how much of f is mixed into g, for differences"),
    "shared": Argument(values.flag, "", "one batch of each level for all of a step (SOBA)"),
    "estimator": Argument(
        values.choice(*values.ESTIMATORS),
        "",
        "how derivatives are estimated from minibatches of a finite sum",
        values.make_estimator,
    ),
    "upper_optimizer": Argument(
        values.optimizer,
        "",
        "an Optax optimiser in place of upper_lr, such as adam(0.003)",
        values.make_optimizer,
    ),
    "lower_optimizer": Argument(
        values.optimizer,
        "",
        "what moves y where the clients' averages meet (e3-aipod), such as restarted_momentum(0.9)",
        values.make_optimizer,
    ),
    "adjoint_optimizer": Argument(
        values.optimizer, "", "the same for the adjoint (e3-aipod)", values.make_optimizer
    ),
}


def entry(solver: str) -> Entry:
    if solver not in SOLVERS:
        raise ValueError(
            f"there is no solver {values.shown(solver)}.{values.suggestion(solver, SOLVERS)} "
            f"Solvers: {', '.join(SOLVERS)}."
        )
    return SOLVERS[solver]


def defaults(solver: str) -> dict[str, Plain | None]:
    """Returns a solver's arguments and their defaults as plain values."""
    parameters = inspect.signature(getattr(aipod, entry(solver).function)).parameters
    return {name: _plain(parameter.default) for name, parameter in parameters.items()}


def make(solver: str, arguments: Mapping[str, Plain]) -> Any:
    """Makes the solver."""
    made: dict[str, Any] = dict(arguments)
    for name, value in arguments.items():
        make_value = ARGUMENTS[name].make
        if make_value is not None:
            made[name] = make_value(value, name)
    return getattr(aipod, entry(solver).function)(**made)


def _plain(default: Any) -> Plain | None:
    if default is None or isinstance(default, bool | int | float | str):
        return default
    if isinstance(default, aipod.Curvature):
        fields = {field.name: field.default for field in dataclasses.fields(default)}
        own = [f"{k}={getattr(default, k)}" for k, v in fields.items() if getattr(default, k) != v]
        return f"curvature({', '.join(own)})" if own else "curvature"
    raise ValueError(f"no plain value stands for the default {default!r}.")
