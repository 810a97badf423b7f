"""A solution as a short table."""

import textwrap
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from aipod.solving._convergence import Convergence
from aipod.solving._ledger import Ledger

_WIDTH, _NAMES = 100, 14


def table(
    message: str,
    convergence: Convergence,
    ledger: Ledger,
    seconds: np.ndarray,
    off: Mapping[str, PyTree],
) -> str:
    """The lines of the table; what a run did not have is left out.

    `off`: how far x and y are off their sets, by name.
    """
    lines = {
        "result": message,
        "converged": _verdict(convergence),
        "advice": convergence.advice,
        "stationarity": _stationarity(convergence),
        "trend": _trend(convergence),
        "feasibility": ", ".join(f"off the {name} by {_largest(v)}" for name, v in off.items()),
        "projections": _counts(
            ledger.projections,
            upper=ledger.upper_projections,
            lower=ledger.lower_projections,
            adjoint=ledger.adjoint_projections,
        ),
        "samples": _counts(ledger.samples, upper=ledger.upper_samples, lower=ledger.lower_samples),
        "rounds": f"{ledger.rounds:,}" if ledger.rounds else "",
        "seconds": f"{seconds[-1]:.3g}" if len(seconds) else "",
    }
    indent = " " * _NAMES
    return "\n".join(
        textwrap.fill(text, _WIDTH, initial_indent=f"{name:<{_NAMES}}", subsequent_indent=indent)
        for name, text in lines.items()
        if text
    )


def _verdict(found: Convergence) -> str:
    word = {True: "yes", False: "no", None: "unknown"}[found.converged]
    return f"{word}: {found.reason}"


def _stationarity(found: Convergence) -> str:
    if found.stationarity is None:
        return "not measured"
    error = f" +- {found.standard_error:.1g}" if found.standard_error else ""
    start = f", at its largest {found.start:.3g}" if found.start else ""
    return f"{found.stationarity:.3g}{error}{start}"


def _trend(found: Convergence) -> str:
    if found.trend is None:
        return ""
    share = f"{100 * max(found.trend, 0.0):.3g} %"
    return f"the last {found.window:,} steps made {share} of the decrease"


def _counts(total: int, **parts: int) -> str:
    named = ", ".join(f"{name} {count:,}" for name, count in parts.items() if count)
    return f"{total:,} ({named})" if total else ""


def _largest(tree: PyTree) -> str:
    """The largest entry of a tree in size, as text."""
    sizes = [np.max(np.abs(np.asarray(leaf)), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return f"{max(sizes, default=0.0):.2g}"
