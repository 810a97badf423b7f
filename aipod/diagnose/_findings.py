"""What `check` returns: findings, the numbers behind them, and a table to print."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal

_TABLE_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `remedy` is empty where the status is ok."""

    name: str
    status: Literal["ok", "warning", "error"]
    value: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """The smallest and the largest eigenvalue; unless `settled`, the true ones lie further out."""

    smallest: float
    largest: float
    settled: bool = True

    def __str__(self) -> str:
        outer = ("", "") if self.settled else ("at most ", "at least ")
        return f"{outer[0]}{self.smallest:.4g} to {outer[1]}{self.largest:.4g}"


@dataclasses.dataclass(frozen=True)
class LowerCurvature:
    """The curvature of g in y on the whole space and on Ker A; None where Ker A is {0}.

    Measured in the inner product in which the set's `project` is orthogonal, because the solvers
    step in it. It is the usual one unless a Consensus is weighted.
    """

    whole: Spectrum
    kernel: Spectrum | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found; prints as a table.

    **Fields:** what could not be measured is empty or None.

    - `ok`: whether there are no errors; warnings may remain.
    - `findings`: every `Finding`, in the order of the table.
    - `ranks`, `dimensions`: the rank of the constraints and the dimension of their null space, for
        `"upper_set"` and `"lower_set"`; None where the constraints were never factored.
    - `lower_curvature`: `whole` and `kernel`, each with `smallest` and `largest`.
    - `gradient_errors`: relative errors against finite differences, for `"upper_x"`, `"upper_y"`,
        `"lower_x"` and `"lower_y"`; NaN where rounding hides the difference.
    - `hypergradient_error`: the same for the hypergradient.
    - `active_bounds`: how many entries of y*(x0) are at a bound, where the lower set has bounds.
    - `strictly_complementary`: whether all their multipliers are clearly not 0, and all other
        entries clearly off their bounds.
    - `suggested`: step sizes by the names of the solvers' arguments.
    """

    findings: tuple[Finding, ...]
    ranks: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    dimensions: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    lower_curvature: LowerCurvature | None = None
    gradient_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hypergradient_error: float | None = None
    active_bounds: int | None = None
    strictly_complementary: bool | None = None
    suggested: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self._of("error")

    def __str__(self) -> str:
        width = max(len(f.name) for f in self.findings)
        lines = [f"{'check':<{width}}  {'status':<7}  finding"]
        for f in self.findings:
            room = _TABLE_WIDTH - width - 11
            text = textwrap.wrap(f.value, room)
            text += textwrap.wrap(f.remedy, room, initial_indent="-> ", subsequent_indent="   ")
            lines.append(f"{f.name:<{width}}  {f.status:<7}  {text[0]}")
            lines += [" " * (width + 11) + part for part in text[1:]]
        totals = [count(len(self._of(status)), status) for status in ("error", "warning")]
        return "\n".join([*lines, ", ".join(totals)])

    def _of(self, status: str) -> list[Finding]:
        return [f for f in self.findings if f.status == status]


class Notes:
    """Collects findings and numbers while `check` runs."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.numbers: dict[str, Any] = {}

    def ok(self, name: str, value: str) -> None:
        self.findings.append(Finding(name, "ok", value))

    def warning(self, name: str, value: str, remedy: str) -> None:
        self.findings.append(Finding(name, "warning", value, remedy))

    def error(self, name: str, value: str, remedy: str) -> None:
        self.findings.append(Finding(name, "error", value, remedy))

    def expect(self, holds: bool, name: str, value: str, remedy: str) -> None:
        """Notes an ok finding where `holds`, else an error."""
        if holds:
            self.ok(name, value)
        else:
            self.error(name, value, remedy)

    def attempt(self, name: str, section: Callable[..., Any], *args: Any) -> Any:
        """Runs section(self, *args); an exception becomes an error finding and returns None."""
        try:
            return section(self, *args)
        except Exception as error:
            self.error(
                name,
                f"raised {type(error).__name__}: {first_line(error)}",
                "call the problem's own functions on x0 and y0 to see the whole traceback.",
            )
            return None

    def report(self) -> Report:
        return Report(tuple(self.findings), **self.numbers)


def first_line(error: Exception) -> str:
    """The first line of an exception's message; JAX adds pages to it."""
    lines = str(error).strip().splitlines()
    return textwrap.shorten(lines[0] if lines else "no message", 400)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
